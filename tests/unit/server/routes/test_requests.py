"""Changes of running requests over HTTP: who may change which, and what is refused."""

from __future__ import annotations

import asyncio

import pytest
from support.serving_fake import refused, serving

from midstream.errors import BusyError, SpecError
from midstream.server.running_requests import _is_of
from midstream.spec import Plan

pytestmark = pytest.mark.anyio
STEER = {"op": "steer", "vector": [1.0, 0.0, 0.0], "layer": 1}
ASKED = {"prompt": ["abc", "de"], "midstream": {"edits": [STEER]}}


def path(request_id="cmpl"):
    return f"/v1/midstream/requests/{request_id}/update"


class Held:
    """A request that goes on until it is released."""

    def __init__(self, site, client, **more):
        self._go = asyncio.Event()
        site.engine.pause = self._go.wait
        self._task = asyncio.create_task(client.post("/v1/completions", json=ASKED, **more))
        self._engine = site.engine

    async def __aenter__(self):
        while not self._engine.running:
            await asyncio.sleep(0)

    async def __aexit__(self, *_):
        self._go.set()
        assert (await self._task).status_code == 200


async def test_a_running_request_gets_other_edits_or_another_strength():
    async with serving() as (site, client):
        async with Held(site, client):
            answer = await client.post(path(), json={"scale": 0.5})
            assert answer.json() == {
                "id": "cmpl",
                "choices": [{"index": 0, "version": 1, "position": 10}],
            }
            other = {**STEER, "layer": 2}
            answer = await client.post(path("cmpl-0"), json={"edits": [other], "scale": 2})
            assert answer.json()["choices"] == [{"index": 0, "version": 2, "position": 20}]
            assert (await client.post(path(), json={"edits": []})).status_code == 200
        own = Plan.parse({"edits": [STEER]})
        edits = Plan.parse({"edits": [other]}).edits
        assert site.engine.updates == [(own, None, 0.5), (own, edits, 2.0), (own, [], None)]
        await refused(client.post(path(), json={"scale": 1}), 404, "no request 'cmpl'")


async def test_another_client_changes_nothing():
    async with serving(has_key=True) as (site, client):
        mine, other = ({"authorization": f"Bearer {key}"} for key in "ab")
        async with Held(site, client, headers=mine):
            for name in ("cmpl", "cmpl-0"):
                body = client.post(path(name), json={"scale": 0}, headers=other)
                error = await refused(body, 404, "of this client")
                assert error["param"] == "id"
            assert not site.engine.updates
            answer = await client.post(path(), json={"scale": 0}, headers=mine)
            assert answer.status_code == 200
    async with (
        serving() as (site, client),
        site.client("10.0.0.9") as stranger,
        Held(site, client),
    ):
        await refused(stranger.post(path(), json={"scale": 0}), 404, "of this client")


async def test_what_is_refused_names_its_field():
    async with serving() as (site, client):
        async with Held(site, client):
            for body, field in (
                ({"edits": [{"op": "steer"}]}, "edits[0]"),
                ({"edits": [{"op": "nothing"}]}, "edits[0].op"),
                ({"scale": "much"}, "scale"),
                ({"strength": 1}, "strength"),
            ):
                error = await refused(client.post(path(), json=body), 400)
                assert error["param"].startswith(field)
            await refused(client.post(path("cmp"), json={"scale": 1}), 404)
            site.engine.refuses = SpecError("edits[0].layer", "there is no layer 9")
            error = await refused(client.post(path(), json={"scale": 1}), 400, "no layer 9")
            assert error["param"] == "edits[0].layer"
            site.engine.refuses = SpecError("request_id", "it is not running")
            await refused(client.post(path(), json={"scale": 1}), 404)
            site.engine.refuses = BusyError("no capacity", 3)
            await refused(client.post(path(), json={"scale": 1}), 503, "no capacity")
        assert not site.engine.updates


def test_the_id_of_a_request_is_that_of_its_calls_with_a_number():
    assert _is_of("cmpl-8f", "cmpl-8f")
    assert _is_of("cmpl-8f-0", "cmpl-8f")
    assert _is_of("chat_12", "chat")
    for other in ("cmpl-8f-", "cmpl-8f-x", "cmpl-8f0", "cmpl-8", "x-cmpl-8f", "cmpl-8f-0-1"):
        assert not _is_of(other, "cmpl-8f")
