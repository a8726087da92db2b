"""Bodies of midstream's own routes: limited before they are parsed, and parsed in a thread."""

import json
import re
import threading
from typing import Any

import pytest
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute
from support.serving_fake import Site, make, refused, serving
from unit.server.asgi import body_of, raw_request

from midstream.server.body_values import LONG, MAX_VALUES
from midstream.server.middleware import _OWN
from midstream.server.routes.common import MidstreamRoute
from midstream.server.running_requests import RunningCall

pytestmark = pytest.mark.anyio
WRITES = ("POST", "PUT", "PATCH")
UPDATE = "/v1/midstream/requests/x/update"
MANY = b'{"x":[' + b"1," * (MAX_VALUES + 1) + b"1]}"
LONG_TEXT = json.dumps({"x": "a" * (LONG + 1)}).encode()


def own_routes(site: Site) -> list[BaseRoute]:
    return [each for each in site.app.routes if getattr(each, "path", "").startswith(_OWN)]


def writes(site: Site) -> list[tuple[str, str]]:
    """(method, path) of every route of midstream that may be sent a body, with "x" in the place of
    each name.
    """
    return [
        (method, re.sub(r"\{[^}]*\}", "x", route.path))
        for route in own_routes(site)
        if isinstance(route, APIRoute)
        for method in sorted(route.methods & {*WRITES})
    ]


async def site_with_a_call(**settings: Any) -> Site:
    """An app in which a request `x` runs, and a name `x` is captured."""
    site = await make(**settings)
    site.engine.captures.set("x", {"layers": [1]}, None)
    call = RunningCall(object(), "x", "127.0.0.1", None, 0, is_numbered=False)
    site.server.running._calls[id(call)] = call
    return site


async def post(
    site: Site, method: str, path: str, parts: list[bytes], length: str | None = None
) -> tuple[int, dict[str, Any], int]:
    """Status and JSON of an answer to a body, and how many parts of the body were read."""
    sent, taken = await raw_request(site.app, parts, method=method, path=path, length=length)
    return sent[0]["status"], json.loads(body_of(sent) or b"{}"), taken


@pytest.fixture
def decoded(monkeypatch):
    """(length, whether on the event loop's thread) of every text that is parsed as JSON."""
    found = []
    decode = json.JSONDecoder.raw_decode  # by which a whole text is decoded as well

    def noted(self, text, *args, **named):
        on_loop = threading.current_thread() is threading.main_thread()
        found.append((len(text), on_loop))
        return decode(self, text, *args, **named)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", noted)
    return found


async def test_every_route_of_midstream_reads_its_body_by_the_one_way():
    site = await make(studio=True)
    assert [each for each in own_routes(site) if not isinstance(each, MidstreamRoute)] == []
    assert len(writes(site)) >= 12


async def test_a_body_of_too_many_values_is_413_before_it_is_parsed(decoded):
    site = await site_with_a_call()
    unread = set()
    for method, path in writes(site):
        status, answer, parts = await post(site, method, path, [MANY])
        if parts:
            assert (status, str(MAX_VALUES) in str(answer)) == (413, True), (path, answer)
        else:
            unread.add(path)
    assert [length for length, _ in decoded if length > 10_000] == []
    # These take no body.
    assert unread == {
        "/v1/midstream/captures/x/collect",
        "/v1/midstream/guards/x/promote",
        "/v1/steering/clear",
        "/v1/steering/vectors",
        "/v1/steering/dynamic",
    }


async def test_a_long_body_is_never_parsed_on_the_event_loop(decoded):
    site = await site_with_a_call()
    read = 0
    for method, path in writes(site):
        decoded.clear()
        status, _, parts = await post(site, method, path, [LONG_TEXT])
        long = {on_loop for length, on_loop in decoded if length > LONG}
        assert long == ({False} if parts else set()), path
        assert status in (200, 400, 404), path
        read += len(long)
    assert read >= 8


async def test_a_body_that_is_too_long_is_413_as_soon_as_it_is():
    site = await site_with_a_call(max_body_bytes=1000)
    for method, path in writes(site):
        status, answer, parts = await post(site, method, path, [b'{"x": 1'] + [b" " * 100] * 20)
        if parts:
            assert (status, "1000 bytes" in str(answer)) == (413, True), (path, answer)
            assert parts == 11, path
        status, _, parts = await post(site, method, path, [b"{}"], length="1001")
        assert (status, parts) == (413, 0), path


async def test_the_body_of_an_update_is_not_read_if_no_such_request_runs():
    async with serving() as (site, client):
        status, answer, parts = await post(site, "POST", UPDATE, [MANY])
        assert (status, parts) == (404, 0)
        assert "no request 'x'" in answer["error"]["message"]
        error = await refused(client.post(UPDATE, json={"unknown": 1}), 404)
        assert error["param"] == "id"


async def test_what_is_malformed_is_400_with_the_problem():
    site = await site_with_a_call()
    for body, problem in (
        (b'{"scale": NaN}', "NaN is not a JSON number"),
        (b'{"scale": 1, "scale": 2}', "duplicate JSON field"),
        (b"{", "expected JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ):
        status, answer, _ = await post(site, "POST", UPDATE, [body])
        assert (status, problem in answer["error"]["message"]) == (400, True), answer
