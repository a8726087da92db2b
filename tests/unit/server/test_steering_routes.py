"""Server-wide steering over HTTP, by midstream's endpoints and by those that others have."""

import asyncio
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from support.others_words import packed
from support.serving_endpoints import Params
from support.serving_fake import refused, serving

from midstream.errors import SpecError
from midstream.plan import Clamp, Steer, Vector

pytestmark = pytest.mark.anyio
STEERING = "/v1/midstream/steering"
V = [1.0, 2.0, 2.0]
STOP = {"op": "probe", "direction": V, "layer": 1, "name": "g", "act": {"stop": {"above": 2}}}


async def test_tiers_are_set_shown_and_cleared():
    async with serving() as (site, client):
        site.engine.vectors.register("x", {1: V})
        steer = {"op": "steer", "vector": V, "layer": "all", "scale": 2}
        answer = await client.put(STEERING, json={"base": steer, "generated": ["x", ["x", 3.0]]})
        state = answer.json()
        assert state["epoch"] == 1
        assert [len(state[tier]) for tier in ("base", "prompt", "generated")] == [1, 0, 2]
        assert (await client.get(STEERING)).json() == state
        state = (await client.put(STEERING, json={"base": []})).json()
        assert [len(state[tier]) for tier in ("base", "prompt", "generated")] == [0, 0, 2]
        state = (await client.delete(STEERING)).json()
        assert (state["epoch"], state["generated"]) == (3, [])
        assert not site.engine.steering


async def test_guards_are_set_and_shown_like_edits():
    async with serving() as (site, client):
        state = (await client.put(STEERING, json={"generated": STOP})).json()
        (shown,) = state["generated"]
        assert (shown["op"], shown["act"]) == ("probe", {"stop": {"above": 2.0}})
        again = (await client.put(STEERING, json={"generated": [shown]})).json()
        assert again["digest"] == state["digest"]
        (probe,) = site.engine.steering.plan_edits()
        assert (probe.name, probe.positions.phase) == ("g", "generated")
        await refused(client.put(STEERING, json={"base": STOP}), 400, "already the name of")
        await refused(
            client.put(STEERING, json={"base": {**STOP, "layer": 9}}), 400, "out of range"
        )


@pytest.mark.parametrize(
    ("tiers", "capture", "is_refused"),
    [
        ({"base": {"op": "steer", "vector": V, "layer": 1}}, None, False),
        ({}, {"layers": 1}, False),
        ({"generated": {"op": "steer", "vector": V, "layer": 1}}, None, True),
        ({"base": STOP}, None, True),
        ({}, {"layers": 1, "positions": "prompt"}, True),
    ],
)
async def test_a_search_for_beams_is_refused_where_it_would_be_steered_or_read_at_other_tokens(
    tiers, capture, is_refused
):
    # It makes a request for each token, whose prompt has the tokens before it.
    beams = Params(max_tokens=1, output_kind=SimpleNamespace(name="CUMULATIVE"))
    async with serving() as (site, _):
        if tiers:
            site.engine.steering.set(**tiers)
        if capture is not None:
            site.engine.captures.set("watch", capture)
        with pytest.raises(SpecError, match="beam_search makes a") if is_refused else nullcontext():
            async for _ in site.engine.generate("abc", beams, "cmpl-1-0f3a-beam-2"):
                pass
        async for _ in site.engine.generate("abc", Params(max_tokens=1), "cmpl-1-0f3a-beam-2"):
            pass


async def test_wrong_tiers_are_refused_and_change_nothing():
    async with serving() as (site, client):
        site.engine.vectors.register("x", {1: V})
        steer = {"op": "steer", "vector": V, "layer": 1}
        for body, problem in (
            ({}, "no tier is given"),
            ({"base": None}, "no tier is given"),
            ({"bases": []}, "bases"),
            ([], "body"),
            ({"base": 3}, "expected an edit"),
            ({"base": "unknown"}, "no vectors are registered"),
            ({"base": {**steer, "layer": 9}}, "out of range"),
            ({"base": {**steer, "vector": [1]}}, "expected 3"),
            ({"prompt": {**steer, "phase": "generated"}}, "contradicts"),
            ({"base": [["x", 1e39]]}, "overflows"),
        ):
            await refused(client.put(STEERING, json=body), 400, problem)
        await refused(client.put(STEERING, content=b'{"base": []}'), 400)  # of no content type
        assert site.engine.steering.epoch == 0


@pytest.mark.parametrize(
    "body", [b'{"base": [], "base": []}', b'{"base": NaN}', b"{", b"", b"[" * 100_000, b"\xff"]
)
@pytest.mark.parametrize("path", [STEERING, "/v1/steering/set"])
async def test_bodies_are_read_strictly(body, path):
    async with serving() as (site, client):
        method = "PUT" if path == STEERING else "POST"
        answer = client.request(
            method, path, content=body, headers={"content-type": "application/json"}
        )
        await refused(answer, 400)
        assert site.engine.steering.epoch == 0


async def test_each_change_answers_with_the_state_that_it_made():
    async with serving() as (_, client):
        bodies = [{"base": {"1": [float(nth + 1), 0, 0]}} for nth in range(20)]
        answers = await asyncio.gather(*(client.put(STEERING, json=body) for body in bodies))
        states = [answer.json() for answer in answers]
    assert sorted(state["epoch"] for state in states) == list(range(1, 21))
    assert len({state["digest"] for state in states}) == 20


async def test_vectors_by_hook_point_are_set_and_their_norms_shown():
    async with serving() as (site, client):
        body = {
            "vectors": {"post_block": {"1": V, "-1": {"vector": V, "scale": -2}}},
            "decode_vectors": {"post_attn": {"2": V}},
        }
        answer = (await client.post("/v1/steering/set", json=body)).json()
        assert answer == {"status": "ok", "layers_updated": [1, 2, 3], "epoch": 1}
        shown = (await client.get("/v1/steering")).json()
        assert shown == {
            "steering": {
                "1": {"resid_post": {"vectors": 3.0}},
                "2": {"resid_mid": {"decode_vectors": 3.0}},
                "3": {"resid_post": {"vectors": 6.0}},
            },
            "active_layers": {
                "1": {"post_block": {"vectors": 3.0}},
                "2": {"post_attn": {"decode_vectors": 3.0}},
                "3": {"post_block": {"vectors": 6.0}},
            },
            "epoch": 1,
        }
        answer = await client.post("/v1/steering/set", json={"prefill_vectors": {"1": V}})
        assert answer.json()["layers_updated"] == [1]
        state = site.engine.steering.show()
        assert [len(state.base), len(state.prompt), len(state.generated)] == [2, 1, 1]
        body = {"vectors": {"1": V}, "replace": True}
        await client.post("/v1/steering/set", json=body)
        state = site.engine.steering.show()
        assert [len(state.base), len(state.prompt), len(state.generated)] == [1, 0, 0]
        assert (await client.post("/v1/steering/clear")).json()["epoch"] == 4
        assert (await client.get("/v1/steering")).json()["steering"] == {}


async def test_packed_vectors_and_clamps_are_set_as_the_same_by_list():
    async with serving() as (site, client):
        body = {
            "vectors": {"post_block": packed([V, V], [1, 3], scales=[1.0, -2.0])},
            "clamps": {"post_block": {"1": [{"vector": V, "max": 4.0}]}},
            "decode_clamps": {"post_attn": packed([V], [2], bounds=[[0.0, 0.0]])},
        }
        answer = (await client.post("/v1/steering/set", json=body)).json()
        assert answer == {"status": "ok", "layers_updated": [1, 2, 3], "epoch": 1}
        state = site.engine.steering.show()
        assert state.base == (Steer(V, 1), Steer(V, 3, -2.0), Clamp(V, 1, high=4.0))
        assert state.generated == (Clamp(V, 2, 0.0, site="resid_mid", phase="generated"),)
        for body, param in (
            ({"clamps": {"post_block": {"1": [{"vector": V}]}}}, 'clamps["post_block"]["1"][0]'),
            ({"vectors": {"post_block": packed([V], [1, 2])}}, 'vectors["post_block"].layer_ind'),
        ):
            error = await refused(client.post("/v1/steering/set", json=body), 400)
            assert error["param"].startswith(param)
        module = {"name": "x", "vectors": {"post_block": packed([V], [1])}}
        assert (await client.post("/v1/steering/modules/register", json=module)).status_code == 200
        assert list(site.engine.vectors.lookup("x").values())[0] == Vector.parse(V)


async def test_other_paths_of_the_fork_say_what_to_use_instead():
    async with serving() as (_, client):
        for path, instead in (("vectors", "modules/register"), ("dynamic", "edit `gate`")):
            answer = await client.post(f"/v1/steering/{path}", json={})
            assert answer.status_code == 404
            assert instead in answer.json()["error"]["message"]


async def test_steering_that_was_set_elsewhere_is_shown_as_far_as_it_adds_vectors():
    async with serving() as (_, client):
        edits = [
            {"op": "steer", "vector": V, "layer": "all"},
            {"op": "steer", "vector": V, "layer": 0},
            {"op": "scale", "factor": 2, "layer": 1},
        ]
        await client.put(STEERING, json={"base": edits})
        shown = (await client.get("/v1/steering")).json()["steering"]
        norms = {layer: found["resid_post"]["vectors"] for layer, found in shown.items()}
        assert norms == {"0": 6.0, "1": 3.0, "2": 3.0, "3": 3.0}
        answer = await client.post("/v1/steering/set", json={"decode_vectors": {"2": V}})
        assert answer.json()["layers_updated"] == [2]


async def test_norms_of_the_largest_numbers_are_numbers():
    async with serving() as (_, client):
        largest = {"vector": [3e38, 3e38, 3e38], "scale": 1e-23}
        await client.post("/v1/steering/set", json={"vectors": {"1": largest}})
        shown = (await client.get("/v1/steering")).json()["steering"]
        assert math.isfinite(shown["1"]["resid_post"]["vectors"])


async def test_wrong_vectors_are_refused_and_change_nothing():
    async with serving() as (site, client):
        for body in (
            {},
            {"replace": False},
            {"vectors": {}},
            {"vectors": "x"},
            {"vectors": {"post_block": V}},
            {"vectors": {"pre_attn": {"1": V}}},
            {"vectors": {"1": V}, "replace": "maybe"},
            {"vectors": {"1": V}, "unknown": 1},
        ):
            await refused(client.post("/v1/steering/set", json=body), 400)
        assert site.engine.steering.epoch == 0


async def test_modules_are_named_vectors():
    async with serving() as (site, client):
        module = {"name": "a/b", "vectors": {"post_block": {"1": V}}}
        answer = await client.post("/v1/steering/modules/register", json=module)
        assert answer.json()["status"] == "ok"
        assert "a/b" in site.engine.vectors
        listed = (await client.get("/v1/steering/modules")).json()["modules"]
        assert [one["name"] for one in listed] == ["a/b"]
        answer = await client.post("/v1/steering/modules/unregister", json={"name": "a/b"})
        assert answer.json() == {"status": "ok", "name": "a/b"}
        again = client.post("/v1/steering/modules/unregister", json={"name": "a/b"})
        await refused(again, 404)
