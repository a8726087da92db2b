"""The endpoints: what they answer, what they refuse, and what they never read."""

import asyncio
import base64
import json
import struct
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from support.open_files import open_files
from support.serving_fake import SHAPE, refused, rows, serving
from support.sinking import delivery, put_now
from unit.server.asgi import raw_request

from midstream.errors import HttpError, SpecError
from midstream.plan.vectors.vector import Vector
from midstream.results.serialization import pack, unpack
from midstream.server.routes import uploads
from midstream.server.routes.uploads import read_file

pytestmark = pytest.mark.anyio
VECTORS, STEERING = "/v1/midstream/vectors", "/v1/midstream/steering"
ROWS, CAPTURES = "/v1/midstream/activations", "/v1/midstream/captures"
V = [1.0, 2.0, 2.0]
BINARY = {"content-type": "application/octet-stream"}


def holding(site, count=5):
    data = pack(rows((1,), count), 3, torch.float32)
    return data, site.server.captures.store(data, "127.0.0.1", "r", {"codec": "raw"})


async def test_server_wide_captures_are_set_shown_collected_and_cleared():
    async with serving() as (site, client):
        body = {"capture": {"layers": [1], "positions": "last_prompt"}}
        about = (await client.put(f"{CAPTURES}/watch", json=body)).json()
        assert about["kept"] == {"completions": 0, "bytes": 0, "dropped": 0}
        assert (await client.get(CAPTURES)).json()["server_wide"] == [about]
        assert (await client.get(f"{CAPTURES}/watch")).json() == about
        for name in ("a", "b"):
            one = delivery(tag="watch", request_id=name, activations=rows((1,), 5))
            put_now(site.engine.sinks.queue("kept"), one, 60)
        answer = (await client.post(f"{CAPTURES}/watch/collect")).json()
        assert [one["request_id"] for one in answer["completions"]] == ["a", "b"]
        assert (answer["dropped"], answer["kept"]) == (0, 0)
        sent = answer["completions"][0]["activations"]
        sent_rows = unpack(base64.b64decode(sent["base64"]))
        assert sent_rows["resid_post", 1].equal(rows((1,), 5)["resid_post", 1])
        assert sent["rows"] == {"resid_post.1": 5}
        assert (await client.delete(f"{CAPTURES}/watch")).status_code == 204
        assert site.engine.captures.current == ()
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/collect")):
            await refused(client.request(method, f"{CAPTURES}/watch{path}"), 404)
        await refused(client.put(f"{CAPTURES}/watch", json={"capture": {"layers": [9]}}), 400)
        await refused(client.put(f"{CAPTURES}/watch", json={**body, "sink": "x"}), 400)
        await refused(client.put(f"{CAPTURES}/watch", json={**body, "class": "os:system"}), 400)
        assert (await client.put(f"{CAPTURES}/watch", json=body)).status_code == 200
        assert (await client.delete(CAPTURES)).status_code == 204
        assert site.engine.captures.current == ()


async def test_rows_that_cannot_be_sent_are_kept(monkeypatch):
    async with serving() as (site, client):
        assert (await client.put(f"{CAPTURES}/watch", json={"capture": {"layers": [1]}})).is_success
        one = delivery(tag="watch", activations=rows((1,), 5))
        put_now(site.engine.sinks.queue("kept"), one, 60)

        def fail(*_):
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr("midstream.server.routes.captures.pack", fail)
            assert (await client.post(f"{CAPTURES}/watch/collect")).status_code == 500
        answer = (await client.post(f"{CAPTURES}/watch/collect")).json()
        assert (len(answer["completions"]), answer["kept"]) == (1, 0)


RANGES = {
    "bytes=0-9": (206, slice(0, 10)),
    "bytes=10-": (206, slice(10, None)),
    "bytes=-7": (206, slice(-7, None)),
    "bytes=0-999999": (206, slice(0, None)),
    "bytes=999999-": (416, None),
    "bytes=5-2": (400, None),
    "bytes": (400, None),
    "rows=0-1": (400, None),
    f"bytes={'9' * 6000}-": (400, None),
}


@pytest.mark.parametrize(("asked", "expected"), RANGES.items(), ids=[key[:20] for key in RANGES])
async def test_ranges_are_served_and_leave_no_file_open(asked, expected):
    status, part = expected
    async with serving() as (site, client):
        data, held = holding(site)
        before = open_files()
        for _ in range(5):
            answer = await client.get(f"{ROWS}/{held.id}", headers={"range": asked})
            assert answer.status_code == status
            if part is not None:
                assert answer.content == data[part]
        assert open_files() <= before


async def test_a_request_that_is_cancelled_while_its_rows_are_packed_leaves_no_file_open():
    async with serving() as (site, client):
        _, held = holding(site)
        before, opened = open_files(), asyncio.Event()
        go, ended = threading.Event(), threading.Event()
        open_rows, loop = site.server.captures.open, asyncio.get_running_loop()

        def slow(*given):
            loop.call_soon_threadsafe(opened.set)
            go.wait(10)
            found = open_rows(*given)
            ended.set()
            return found

        site.server.captures.open = slow
        asked = asyncio.create_task(client.get(f"{ROWS}/{held.id}"))
        await opened.wait()
        asked.cancel()
        loop.call_later(0.1, go.set)
        with pytest.raises(asyncio.CancelledError):
            await asked
        for _ in range(100):
            if ended.is_set() and not site.server.captures._read and open_files() <= before:
                break
            await asyncio.sleep(0.02)
        assert ended.is_set()
        assert not site.server.captures._read
        assert open_files() <= before


async def test_a_client_that_reads_nothing_of_its_rows_gets_no_more_of_them():
    async with serving(stall_seconds=0.3) as (site, _):
        _, held = holding(site, count=20_000)
        before, path = open_files(), f"{ROWS}/{held.id}"
        answer = raw_request(site.app, method="GET", path=path, stays=True, reads=2)
        sent, _ = await asyncio.wait_for(answer, 20)
        assert len(sent) == 2
        assert not site.server.captures._read
        assert open_files() <= before


@pytest.mark.parametrize(
    "name", ["..", "../../etc/passwd", "%2e%2e%2fetc", "a" * 65, "é", "a.b", "%00"]
)
async def test_an_id_is_no_path(name):
    async with serving() as (_, client):
        for ask in (client.get, client.delete):
            answer = await ask(f"{ROWS}/{name}")
            assert answer.status_code in (400, 404, 405)


async def test_another_address_does_not_see_rows_and_a_header_changes_nothing():
    async with serving() as (site, client):
        holding(site)
        async with site.client("10.0.0.2") as other:
            assert (await other.get(CAPTURES)).json()["captures"] == []
        # On a server without keys a header that looks like one makes no new client.
        listed = await client.get(CAPTURES, headers={"authorization": "Bearer other"})
        assert len(listed.json()["captures"]) == 1


async def test_another_key_does_not_see_rows_and_the_spelling_of_a_header_makes_no_client():
    async with serving(has_key=True, client_captures=1) as (site, client):
        asked = {"prompt": "abc", "midstream": {"capture": {"layers": [1]}}}

        async def post(header):
            return await client.post(
                "/v1/completions", json=asked, headers={"authorization": header}
            )

        answer = await post("Bearer mine")
        url = answer.json()["midstream"]["activations"]["url"]
        for method in ("GET", "DELETE"):
            other = client.request(method, url, headers={"authorization": "Bearer other"})
            await refused(other, 404)
        for header in ("bearer mine", "BEARER mine", "Bearer mine"):
            assert (await post(header)).status_code == 429
        assert (await post("Bearer other")).status_code == 200
        listed = {
            header: len(
                (await client.get(CAPTURES, headers={"authorization": header})).json()["captures"]
            )
            for header in ("Bearer mine", "bEARER mine", "Bearer other", "Bearer third")
        }
    assert list(listed.values()) == [1, 1, 1, 0]


UPLOADS = {
    "by layer": {"1": V, "-1": {"vector": V, "scale": 2}},
    "by site": {"resid_post": {"1": V}, "post_attn": {"2": V}},
    "base64": {"1": {"f32": base64.b64encode(np.asarray(V, "<f4").tobytes()).decode()}},
    "for no layer": V,
    "by key": {"resid_post.1": V},
    "matrices": {
        "1": [V, V, V],
        "2": {"f32": base64.b64encode(np.eye(3, dtype="<f4").tobytes()).decode(), "shape": [3, 3]},
    },
}


@pytest.mark.parametrize("vectors", UPLOADS.values(), ids=UPLOADS)
async def test_vectors_are_registered_shown_listed_and_removed(vectors):
    async with serving() as (site, client):
        about = (await client.put(f"{VECTORS}/x", json=vectors)).json()
        site.engine.vectors.register("same", vectors)
        assert site.engine.vectors.lookup("x") == site.engine.vectors.lookup("same")
        shown = (await client.get(f"{VECTORS}/x")).json()
        assert {**about, "vectors": shown["vectors"]} == shown
        expected = [vector.emit() for vector in site.engine.vectors.lookup("x").values()]
        assert shown["vectors"] == expected
        listed = (await client.get(VECTORS)).json()["vectors"]
        assert [one["name"] for one in listed] == ["same", "x"]
        assert (await client.delete(f"{VECTORS}/x")).status_code == 204
        await refused(client.delete(f"{VECTORS}/x"), 404)
        await refused(client.get(f"{VECTORS}/x"), 404)


async def test_whole_edits_are_registered_shown_listed_and_removed():
    clamp = {"op": "clamp", "direction": V, "layer": 2, "high": 1.0}
    whole = {"base": {"2": V}, "generated": [{"op": "scale", "factor": 0.5, "layer": 1}],
             "edits": [clamp]}  # fmt: skip
    async with serving() as (site, client):
        answer = (await client.put(f"{VECTORS}/calm", json=whole)).json()
        assert answer["edits"] == ["steer", "scale", "clamp"]
        shown = (await client.get(f"{VECTORS}/calm")).json()
        assert [one["op"] for one in shown["edits"]] == ["steer", "scale", "clamp"]
        assert "vectors" not in shown
        again = (await client.put(f"{VECTORS}/again", json={"edits": shown["edits"]})).json()
        assert again["digest"] == answer["digest"]
        await refused(client.put(f"{VECTORS}/x", json={"base": "nowhere.json"}), 400)
        await refused(client.put(f"{VECTORS}/x", json={"base": [], "edits": 5}), 400)
        assert len((await client.get(VECTORS)).json()["vectors"]) == 2


async def test_a_safetensors_file_is_registered_in_any_real_dtype():
    async with serving() as (site, client):
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8):
            data = save({"resid_post.1": torch.tensor(V).to(dtype)})
            answer = await client.put(f"{VECTORS}/x", content=data, headers=BINARY)
            assert answer.status_code == 200
            assert site.engine.vectors.lookup("x")["resid_post", 1] == Vector.parse(V)
        data = save({"vector": torch.tensor(V)})
        await client.put(f"{VECTORS}/y", content=data, headers=BINARY)
        assert dict(site.engine.vectors.lookup("y")) == {None: Vector.parse(V)}


async def test_every_name_that_the_registry_takes_can_be_used_and_no_other():
    async with serving() as (site, client):
        for name in ("a", "_a", "a/b:c.d-e", "x" * 128):
            assert (await client.put(f"{VECTORS}/{name}", json=V)).status_code == 200
            assert (await client.get(f"{VECTORS}/{name}")).json()["name"] == name
            assert (await client.delete(f"{VECTORS}/{name}")).status_code == 204
        for name in (".a", "x" * 129, "a b", "é", "a;b"):
            await refused(client.put(f"{VECTORS}/{name}", json=V), 400, "name")
            module = {"name": name, "vectors": V}
            await refused(client.post("/v1/steering/modules/register", json=module), 400)
        assert len(site.engine.vectors) == 0


async def test_no_value_of_a_client_is_ever_a_path(tmp_path, monkeypatch):
    np.savez(tmp_path / "v.npz", vector=np.asarray(V, "f4"))
    path = str(tmp_path / "v.npz")

    def opened(*_):
        pytest.fail("a file was read")

    from midstream.steering import registry

    monkeypatch.setattr(registry, "read_file", opened)
    async with serving() as (site, client):
        for value in (
            path,
            [path],
            {"1": path},
            {"resid_post": {"1": path}},
            {"1": {"vector": path}},
            {"1": {"f32": path}},
            {"path": path},
            {path: V},
        ):
            await refused(client.put(f"{VECTORS}/x", json=value), 400)
            await refused(
                client.post("/v1/steering/modules/register", json={"name": "x", "vectors": value}),
                400,
            )
            for field in ("vectors", "prefill_vectors", "decode_vectors"):
                await refused(client.post("/v1/steering/set", json={field: value}), 400)
            for tier in ("base", "prompt", "generated"):
                await refused(client.put(STEERING, json={tier: value}), 400)
            steer = {"vector": value, "layer": 1}
            asked = {"prompt": "abc", "midstream": {"steer": steer}}
            await refused(client.post("/v1/completions", json=asked), 400)
        assert len(site.engine.vectors) == 0
        assert site.engine.calls == []


async def test_a_tier_that_there_is_not_is_named_with_what_is_right():
    async with serving() as (site, client):
        for body, said in (
            ({"all": []}, "all: unknown field; known: `base`, `prompt`, `generated`"),
            ({"prompts": []}, "prompts: unknown field (did you mean `prompt`?)"),
        ):
            await refused(client.put(STEERING, json=body), 400, said)
        assert not site.engine.steering.show().edits


WRONG_UPLOADS = {
    "no JSON": (b"{", {}, 400),
    "no UTF-8": (b'{"1": "\xff"}', {}, 400),
    "NaN": (b"[NaN, 1, 1]", {}, 400),
    "a number too large": (b"[1e400, 1, 1]", {}, 400),
    "an integer of many digits": (b"[" + b"9" * 5000 + b", 1, 1]", {}, 400),
    "a layer twice": (b'{"1": [1,1,1], "1": [1,1,1]}', {}, 400),
    "the same layer": (b'{"1": [1,1,1], "-3": [1,1,1]}', {}, 400),
    "too deep": (b"[" * 100_000, {}, 400),
    "no layer of the model": (b'{"9": [1,1,1]}', {}, 400),
    "a site that is not tapped": (b'{"resid_pre": {"1": [1,1,1]}}', {}, 400),
    "the wrong width": (b'{"1": [1,1]}', {}, 400),
    "half a character as a key": (b'{"\\ud800": [1,1,1]}', {}, 400),
    "nothing": (b"", {}, 400),
    "null": (b"null", {}, 400),
    "a file that is none": (b"pickle", BINARY, 400),
    "an empty file": (b"", BINARY, 400),
    "another kind": (b"x", {"content-type": "application/x-pickle"}, 415),
    "a form": (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415),
}


@pytest.mark.parametrize(("body", "headers", "status"), WRONG_UPLOADS.values(), ids=WRONG_UPLOADS)
async def test_a_malformed_upload_is_refused_and_changes_nothing(body, headers, status):
    async with serving() as (site, client):
        headers = headers or {"content-type": "application/json"}
        await refused(client.put(f"{VECTORS}/x", content=body, headers=headers), status)
        assert len(site.engine.vectors) == 0


def file_of(header, data=b""):
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text)) + text + data


HEADERS = st.recursive(
    st.none() | st.integers() | st.text(max_size=4) | st.sampled_from(["F32", "BF16", "C64", "F4"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["1", "dtype", "shape", "data_offsets", "__metadata__", "vector"]),
            inner,
        )
    ),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(
            ["F32", "F64", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "C64", "BOOL", "U64", "X"]
        ),
        "shape": st.lists(st.integers(-1, 4) | st.just(1 << 62), max_size=3),
        "data_offsets": st.lists(st.integers(0, 16), min_size=1, max_size=3),
    }
)


@settings(max_examples=200)
@given(
    st.binary(max_size=40)
    | st.builds(file_of, HEADERS, st.binary(max_size=16))
    | st.builds(
        lambda entry, data: file_of({"1": entry}, data),
        ENTRIES,
        st.binary(min_size=12, max_size=16),
    )
)
def test_hostile_files_are_read_or_refused(data):
    from midstream.steering import VectorRegistry

    try:
        VectorRegistry(SHAPE).register("x", read_file(data))
    except SpecError as error:
        problem = str(error)
    except HttpError as refusal:
        problem = refusal.message
    else:
        problem = ""
    assert len(problem) < 1000


async def test_vectors_that_are_too_many_are_507_and_removing_some_helps(monkeypatch):
    from midstream.steering import registry

    async with serving(vector_bytes=36) as (site, client):
        assert (await client.put(f"{VECTORS}/a", json={"0": V, "1": V})).status_code == 200
        # One more fits, two do not; in place of its own it does.
        error = await refused(client.put(f"{VECTORS}/b", json={"0": V, "1": V}), 507, "24 bytes")
        assert error["param"] == "vectors"
        module = {"name": "b", "vectors": {"0": V, "1": V}}
        await refused(client.post("/v1/steering/modules/register", json=module), 507)
        assert (await client.put(f"{VECTORS}/b", json={"0": V})).status_code == 200
        assert (await client.put(f"{VECTORS}/a", json={"2": V, "1": V})).status_code == 200
        await client.delete(f"{VECTORS}/a")
        assert (await client.put(f"{VECTORS}/b", json={"0": V, "1": V})).status_code == 200
        monkeypatch.setattr(registry, "MAX_NAMES", 1)
        await refused(client.put(f"{VECTORS}/c", json=V), 507, "1 names")


@pytest.mark.parametrize("names", ["{:05}", "{:0300}"])
def test_a_file_of_too_many_tensors_is_refused_before_it_is_loaded(names, monkeypatch):
    monkeypatch.setattr("safetensors.torch.load", lambda _: pytest.fail("it is loaded"))
    tensor = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({names.format(nth): tensor for nth in range(5000)}).encode()
    body = len(header).to_bytes(8, "little") + header
    with pytest.raises(SpecError, match="at most 4096 tensors"):
        uploads.read_file(body)
