"""Changes of running requests over HTTP: who may change which, and what is refused."""

import asyncio

import numpy as np
import pytest
from support.serving_fake import refused, serving

from midstream.errors import BusyError, HttpError, SpecError
from midstream.plan import Plan
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.server.running_requests import RunningCall, RunningRequests

pytestmark = pytest.mark.anyio
STEER = {"op": "steer", "vector": [1.0, 0.0, 0.0], "layer": 1}
ASKED = {"prompt": ["abc", "de"], "midstream": {"edits": [STEER]}}


def path(request_id="cmpl"):
    return f"/v1/midstream/requests/{request_id}/update"


class Held:
    def __init__(self, site, client, where="/v1/completions", asked=ASKED, **more):
        self._go = asyncio.Event()
        site.engine.pause = self._go.wait
        self._task = asyncio.create_task(client.post(where, json=asked, **more))
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


async def test_of_two_clients_with_one_id_each_changes_its_own():
    async with serving(has_key=True) as (site, client):
        mine, other = ({"authorization": f"Bearer {key}"} for key in "ab")
        theirs = {**ASKED, "midstream": {"edits": [{**STEER, "layer": 3}]}}
        async with Held(site, client, headers=mine):
            twin = asyncio.create_task(client.post("/v1/completions", json=theirs, headers=other))
            while site.engine.running < 2:
                await asyncio.sleep(0)
            for asked, headers, scale in ((ASKED, mine, 0.5), (theirs, other, 2.0)):
                answer = await client.post(path(), json={"scale": scale}, headers=headers)
                assert answer.status_code == 200
                own = Plan.parse({"edits": asked["midstream"]["edits"]})
                assert site.engine.updates.pop() == (own, None, scale)
            assert not site.engine.updates
        assert (await twin).status_code == 200


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


def running(*calls):
    """What finds these calls, (engine's id, whether it is a chat's), by one client."""
    found = RunningRequests()
    for nth, (name, is_chat) in enumerate(calls):
        of = name if is_chat else name[:-2]
        context = found.running(RunningCall(of, name, "me", CallPlan(None), nth, not is_chat))
        context.__enter__()
        found.contexts = [*getattr(found, "contexts", ()), context]
    return lambda name: [call.request_id for call in found.find(name, "me")]


def test_an_id_that_is_another_with_a_number_is_that_of_another_request():
    find = running(("chatcmpl-exp", True), ("chatcmpl-exp-1", True), ("chatcmpl-exp_2", True))
    assert find("chatcmpl-exp") == ["chatcmpl-exp"]
    assert find("chatcmpl-exp-1") == ["chatcmpl-exp-1"]
    assert running(("chatcmpl-exp-1", True))("chatcmpl-exp") == []
    find = running(("cmpl-exp-0", False), ("cmpl-exp-1", False), ("cmpl-exp-1-0", False))
    assert find("cmpl-exp") == ["cmpl-exp-0", "cmpl-exp-1"]
    assert find("cmpl-exp-1") == ["cmpl-exp-1-0"]
    assert find("cmpl-exp-0") == ["cmpl-exp-0"]
    assert running(("resp_a_0", False), ("resp_a_1", False))("resp_a") == ["resp_a_0", "resp_a_1"]


async def test_an_id_of_two_running_requests_is_refused():
    """They have the same `X-Request-Id`, for example one is a retry of the other."""
    async with serving() as (site, client):
        async with Held(site, client):
            twin = asyncio.create_task(client.post("/v1/completions", json=ASKED))
            while site.engine.running < 2:
                await asyncio.sleep(0)
            for name in ("cmpl", "cmpl-0"):
                error = await refused(
                    client.post(path(name), json={"scale": 0}), 409, f"have the id '{name}'"
                )
                assert error["param"] == "id"
                assert "X-Request-Id" in error["message"]
            assert not site.engine.updates
        await twin
        async with Held(site, client):
            assert (await client.post(path(), json={"scale": 0})).status_code == 200


def test_requests_with_one_id_are_told_apart_when_different_prompts_of_theirs_run():
    found = RunningRequests()
    first, second = (
        RunningCall(of, name, "me", CallPlan(None), nth)
        for of, name, nth in (("a", "cmpl-x-1", 1), ("b", "cmpl-x-0", 0))
    )
    with found.running(first), found.running(second):
        with pytest.raises(HttpError, match="2 running requests"):
            found.find("cmpl-x", "me")
        assert found.find("cmpl-x-1", "me") == [first]
    with found.running(first):
        assert found.find("cmpl-x", "me") == [first]


async def test_a_chat_is_found_by_its_own_id_only():
    async with serving() as (site, client):
        body = {"messages": [{"role": "user", "content": "a"}], "midstream": {"edits": [STEER]}}
        async with Held(site, client, "/v1/chat/completions", body):
            assert (await client.post(path("cmpl-0"), json={"scale": 0})).status_code == 200
            await refused(client.post(path("cmpl"), json={"scale": 0}), 404)


async def test_an_update_has_cached_rows_too():
    async with serving() as (site, client):
        body = {"prompt": "abc", "midstream": {"capture": {"layers": [1]}}}
        answer = (await client.post("/v1/completions", json=body)).json()
        about = answer["midstream"]["activations"]
        edit = {"op": "replace", "layer": 1, "rows": {"captured": about["id"], "positions": [2]}}
        async with Held(site, client):
            answer = await client.post(path(), json={"edits": [edit]})
            assert answer.status_code == 200, answer.text
            edit["rows"]["captured"] = "unknown"
            error = await refused(client.post(path(), json={"edits": [edit]}), 400, "no rows")
            assert error["param"].startswith("edits[0].rows.captured")
        ((_, (given,), _),) = site.engine.updates
        assert [np.frombuffer(row.data, "<f4").tolist() for row in given.rows] == [[21.0] * 3]
