"""What a web page of elsewhere gets, for every combination of settings, keys and addresses."""

import itertools
from typing import Any

import httpx
import pytest
from support.nightly import NIGHTLY
from support.serving_fake import refused, serving

from midstream.config.http import ADMIN_HEADER

pytestmark = pytest.mark.anyio
PLAN = {"prompt": "abc", "midstream": {"capture": {"layers": [1]}}}
READS = ("/v1/midstream/vectors", "/v1/midstream/captures", "/v1/midstream/status",
         "/v1/midstream/steering")  # fmt: skip
ROUTES = {
    "read": [("GET", path, None) for path in READS],
    "run": [("POST", "/v1/completions", PLAN)],
    "change": [("PUT", "/v1/midstream/steering", {"base": []})],
}
SETTINGS = [*itertools.product((None, True, False), (None, "secret"), (False, True))]
BOUND = ("127.0.0.1", None, *(["::1"] if NIGHTLY else []))
HOSTS = ("localhost:8000", "[::1]:8000", "evil.example:8000")
ORIGINS = (None, "http://localhost:3000", "https://evil.example")
SENT = (None, "wrong", "secret")


def statuses(
    setting: tuple[bool | None, str | None, bool],
    bound: str | None,
    asked: tuple[str, str | None, str | None],
    kind: str,
) -> set[int]:
    """The statuses that a request may be answered with, by the rule alone: a web page knows no key,
    and is asked where it comes from. A server that the network reaches has names that it does not
    know itself: there a page of elsewhere may read what everybody may read, but changes nothing.
    """
    allowed, admin_key, api_key = setting
    host, origin, sent = asked
    on_this_machine = bound is not None
    knows_admin_key = admin_key is not None and sent == admin_key
    knows_a_key = api_key or knows_admin_key
    is_foreign_name = on_this_machine and host.startswith("evil")
    # Where the server's own name is foreign to it, a page of that name is its own.
    is_foreign_page = origin == "https://evil.example" and not (
        host.startswith("evil") and not on_this_machine
    )
    refusals = set()
    if not knows_a_key and is_foreign_name:
        refusals.add(403)
    if not knows_a_key and is_foreign_page and (on_this_machine or kind == "change"):
        refusals.add(403)
    if kind == "change":
        may_change = allowed
        if may_change is None:
            may_change = on_this_machine or api_key or admin_key is not None
        if not may_change:
            refusals.add(403)
        elif admin_key is not None and not knows_admin_key:
            refusals.add(401)
    return refusals or {200}


async def ask(
    client: httpx.AsyncClient,
    route: tuple[str, str, Any],
    asked: tuple[str, str | None, str | None],
) -> httpx.Response:
    host, origin, sent = asked
    headers = {"host": host, "origin": origin, ADMIN_HEADER: sent}
    method, path, body = route
    given = {name: value for name, value in headers.items() if value is not None}
    return await client.request(method, path, json=body, headers=given)


@pytest.mark.parametrize("bound", BOUND)
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
async def test_every_setting_key_address_and_page_is_answered_by_the_rule(
    setting, bound, monkeypatch
):
    allowed, admin_key, api_key = setting
    if admin_key is not None:
        monkeypatch.setenv("MIDSTREAM_ADMIN_KEY", admin_key)
    http = {} if allowed is None else {"admin": allowed}
    cases = itertools.product(HOSTS, ORIGINS, SENT)
    async with serving(host=bound, has_key=api_key, **http) as (site, client):
        for number, asked in enumerate(cases):
            for kind, routes in ROUTES.items():
                # By day one route of a kind for each request, in turn.
                for route in routes if NIGHTLY else [routes[number % len(routes)]]:
                    before = len(site.engine.calls), site.engine.steering.epoch
                    answer = await ask(client, route, asked)
                    case = (asked, route, answer.status_code, answer.text)
                    assert answer.status_code in statuses(setting, bound, asked, kind), case
                    if answer.status_code != 200:
                        # Nothing was computed and nothing was changed.
                        assert before == (len(site.engine.calls), site.engine.steering.epoch), case


@pytest.mark.parametrize("setting", [(True, None), (False, None), (None, "secret")], ids=str)
async def test_a_setting_alone_lets_no_page_in(setting, monkeypatch):
    allowed, admin_key = setting
    if admin_key is not None:
        monkeypatch.setenv("MIDSTREAM_ADMIN_KEY", admin_key)
    http = {} if allowed is None else {"admin": allowed}
    async with serving(**http) as (site, client):
        for headers in ({"host": "evil.example"}, {"origin": "https://evil.example"}):
            for path in READS:
                await refused(client.get(path, headers=headers), 403, "evil.example")
            await refused(client.post("/v1/completions", json=PLAN, headers=headers), 403)
        assert site.engine.calls == []


async def test_pages_of_the_origins_that_the_server_names_are_its_own():
    origins = ["https://ui.example", "*"]
    async with serving(origins=origins) as (_, client):
        page = {"origin": "https://ui.example"}
        assert (await client.get(READS[0], headers=page)).status_code == 200
        change = {"json": {"base": []}, "headers": page}
        assert (await client.put("/v1/midstream/steering", **change)).status_code == 200
        for other in ("https://ui.example.evil.example", "http://ui.example", "null", "*"):
            await refused(client.get(READS[0], headers={"origin": other}), 403)
        # The name of the server is no matter of the pages.
        await refused(client.get(READS[0], headers={**page, "host": "evil.example"}), 403)
