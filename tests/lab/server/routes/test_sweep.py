"""Sweeps over HTTP: what is answered and refused, and that ordinary requests go first."""

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.sae_cases import random_sae
from support.serving_fake import WIDTH, refused, rows, scope_of, serving
from support.sweep_fake import A, B, expected, logprob_of, unpatched

from midstream.errors import BusyError, SpecError
from midstream.http.sse import DONE, Events
from midstream.lab.sweep import LogProb, Sweep, SweepRequest
from midstream.lab.sweep.source import RowsSource
from midstream.results.serialization import pack

pytestmark = pytest.mark.anyio
PATH = "/v1/midstream/sweep"
BODY = {
    "prompt": "abcd",
    "source": "efgh",
    "metric": {"logit_diff": ["x", "z"]},
    "sites": "resid_post",
}


def events_of(content):
    """The events of a whole stream, as (name, value); `[DONE]` is a name without a value."""
    return [
        ("[DONE]", None) if one.data == DONE else (one.name.decode(), one.value)
        for one in Events().feed(content)
    ]


async def until(holds):
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to hold")


async def test_a_stream_has_start_every_cell_result_and_done():
    async with serving() as (site, client):
        answer = await client.post(PATH, json=BODY)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    (first, start), *cells, (last, result), done = events_of(answer.content)
    assert (first, last, done) == ("start", "result", ("[DONE]", None))
    assert start["type"] == "start"
    assert start["dims"] == ["site", "layer", "position"]
    assert start["coords"] == {
        "site": ["resid_post"], "layer": [0, 1, 2, 3], "position": [0, 1, 2, 3]
    }  # fmt: skip
    assert start["tokens"] == ["a", "b", "c", "d"]
    assert start["positions"] == [[0], [1], [2], [3]]
    assert start["metric"] == BODY["metric"]
    assert start["cells"] == len(cells) == 16
    runs = [tuple(map(ord, text)) for text in ("abcd", "efgh")]
    corrupt, clean = (unpatched(A, run) - unpatched(B, run) for run in runs)
    assert (start["corrupt"], start["clean"]) == (corrupt, clean)
    values = np.full((1, 4, 4), np.nan, np.float32)
    for name, value in cells:
        assert name == value["type"] == "cell"
        values[tuple(value["index"])] = value["value"]
    assert np.array_equal(values, expected())
    assert result["noise_floor"] == 0
    assert result["receipts"] == {
        "runs": 17, "status": "ok", "expected": 16, "applied": 16, "cached": 0, "problems": []
    }  # fmt: skip
    # The two unpatched runs, the cells and the three repeats.
    assert result["prompt_tokens"] == 4 * (2 + 16 + 3)


async def test_features_of_an_sae_are_a_dimension():
    async with serving() as (site, client):
        site.engine.vectors.saes = {"s": random_sae(WIDTH, 8, 0)}.__getitem__
        body = {**BODY, "source": 1.5, "layers": [1, 3], "sae": "s", "features": [5, 2]}
        answer = await client.post(PATH, json=body)
        error = await refused(client.post(PATH, json={**body, "features": [8]}), 400)
    (_, start), *cells, _, _ = events_of(answer.content)
    assert start["dims"] == ["site", "layer", "position", "feature"]
    assert start["coords"]["feature"] == [5, 2]
    assert len(cells) == start["cells"] == 16
    for _, value in cells:
        _, row, place, _ = value["index"]
        layer = start["coords"]["layer"][row]
        wanted = logprob_of(A, layer, place) - logprob_of(B, layer, place)
        assert value["value"] == pytest.approx(wanted)
    assert error["param"] == "features"


async def test_without_a_stream_the_answer_is_one_sweep():
    async with serving() as (_, client):
        answer = await client.post(PATH, json={**BODY, "stream": False})
    assert answer.headers["content-type"] == "application/json"
    found = Sweep.from_json(answer.json())
    assert np.array_equal(found.values, expected())
    assert (found.receipts.status, len(found.receipts), found.receipts.applied) == ("ok", 17, 16)


@pytest.mark.parametrize("source", [0, "zero", {"name": "v"}])
async def test_a_source_without_a_prompt_has_no_clean_run(source):
    async with serving() as (site, client):
        site.engine.vectors.register("v", [1.0, 2.0, 2.0])
        body = {**BODY, "source": source, "layers": 1, "groups": {"second": [1]}}
        answer = await client.post(PATH, json={**body, "metric": {"logprob": A}})
    events = events_of(answer.content)
    assert events[0][1]["clean"] is None
    assert events[0][1]["coords"]["position"] == ["second"]
    assert events[1][1]["value"] == logprob_of(A, 1, 1)


async def test_the_source_may_be_rows_of_an_earlier_request_of_the_same_client():
    async with serving(has_key=True) as (site, client):
        data = pack(rows((1, 2), 4), 3, torch.float32)
        owner = {"authorization": "Bearer mine"}
        mine = site.server.client_of(
            {"headers": [(b"authorization", b"Bearer mine")], "type": "http"}
        )
        held = site.server.captures.store(data, mine, "r", {"codec": "raw"})
        body = {**BODY, "source": {"captured": held.id}, "metric": {"logprob": "x"}}
        answer = await client.post(PATH, json=body, headers=owner)
        found = [value["index"] for name, value in events_of(answer.content) if name == "cell"]
        # Layers 0 and 3 have no rows: no cell is made of them.
        assert {layer for _, layer, _ in found} == {1, 2}
        other = {"authorization": "Bearer other"}
        error = await refused(client.post(PATH, json=body, headers=other), 400, "there are no rows")
        assert error["param"] == "source.captured"


async def test_rows_by_value_keep_their_positions_and_the_prompt_that_they_are_of():
    request = SweepRequest(
        RowsSource({("resid_post", 2): np.ones((2, 3), np.float32)},
                   {("resid_post", 2): (1, 3)}, 4, tuple(map(ord, "efgh"))),
        LogProb("x"), sites="resid_post",
    )  # fmt: skip
    async with serving() as (_, client):
        answer = await client.post(PATH, json={"prompt": "abcd", **request.to_dict()})
    (_, start), *cells, _, _ = events_of(answer.content)
    assert start["clean"] == unpatched(A, tuple(map(ord, "efgh")))
    assert sorted(value["index"] for _, value in cells) == [[0, 2, 1], [0, 2, 3]]


async def test_a_chat_is_text_and_gets_the_servers_template():
    async with serving() as (site, client):
        site.server.template["chat_template_content_format"] = "string"
        body = {**BODY, "prompt": [{"role": "user", "content": "abcd"}]}
        answer = await client.post(PATH, json={**body, "add_generation_prompt": False})
        assert answer.status_code == 200
        assert site.engine.template == {
            "chat_template_content_format": "string", "add_generation_prompt": False
        }  # fmt: skip
        image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}}]
        for name in ("prompt", "source"):
            given = {**BODY, name: [{"role": "user", "content": image}]}
            error = await refused(client.post(PATH, json=given), 400, "expected text")
            assert error["param"] == f"{name}[0].content"


async def test_a_model_is_the_served_one_or_an_adapter():
    async with serving() as (site, client):
        site.app.state.openai_serving_models = SimpleNamespace(
            is_base_model=lambda name: name == "m", lora_requests={"adapter": "the adapter"}
        )
        for name, adapter in (("m", None), ("adapter", "the adapter")):
            assert (await client.post(PATH, json={**BODY, "model": name})).status_code == 200
            assert site.engine.vllm_args["lora_request"] == adapter
        error = await refused(client.post(PATH, json={**BODY, "model": "other"}), 404)
        assert error["param"] == "model"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ...}, "prompt"),
        ({"source": {"captured": "no"}}, "source.captured"),
        ({"source": {"name": "no"}}, "source"),
        ({"metric": ...}, "metric"),
        ({"metric": {"function": "os.system"}}, "metric"),
        ({"metric": {"logit_diff": ["x", "xx"]}}, "metric.logit_diff[1]"),
        ({"layers": 9}, "layers"),
        ({"positions": [7]}, "positions"),
        ({"source": "longer"}, "align"),
        ({"repeats": -1}, "repeats"),
        ({"model": 3}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"chat_template": "{{ x }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": ""}}, "chat_template_kwargs.chat_template"),
        ({"add_generation_prompt": 1}, "add_generation_prompt"),
        ({"midstream": {}}, "midstream"),
        ({"layerz": [1]}, "layerz"),
    ],
)
async def test_what_is_malformed_is_refused_with_its_place_before_any_run(change, param):
    body = {**BODY, **change}
    body = {name: value for name, value in body.items() if value is not ...}
    async with serving() as (site, client):
        for stream in (True, False):
            given = body if "stream" in change else {**body, "stream": stream}
            error = await refused(client.post(PATH, json=given), 400)
            assert error["param"].startswith(param)
        assert site.engine.calls == []
        assert site.server.sweeps.sweeps == 0


async def test_bodies_are_limited_and_read_strictly():
    async with serving(max_body_bytes=1000, sweep_cells=15) as (site, client):
        error = await refused(
            client.post(PATH, json=BODY), 400, "16 cells, more than the limit of 15"
        )
        assert error["param"] is None
        await refused(client.post(PATH, json={**BODY, "prompt": "a" * 1000}), 413)
        asked = {"content": json.dumps(BODY)}
        await refused(client.post(PATH, **asked, headers={"content-type": "text/plain"}), 415)
        kind = {"content-type": "application/json"}
        for text in ("", "[]", "3", "{", '{"prompt": "a", "prompt": "b"}', '{"alpha": NaN}'):
            await refused(client.post(PATH, content=text, headers=kind), 400)
        assert site.engine.calls == []
    async with serving() as (site, client):
        numbers = "[" + "0," * ((1 << 20) + 1) + "0]"
        text = json.dumps({**BODY, "source": 7}).replace("7", numbers)
        await refused(client.post(PATH, content=text, headers=kind), 413, "values")


async def test_sweeps_beyond_the_limit_are_503_and_can_come_later():
    async with serving(running_sweeps=1) as (site, client):
        go = asyncio.Event()
        site.engine.pause = go.wait
        first = asyncio.ensure_future(client.post(PATH, json=BODY))
        await until(lambda: site.engine.running)
        answer = await client.post(PATH, json=BODY)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "5"
        assert "http.running_sweeps" in answer.json()["error"]["message"]
        go.set()
        assert (await first).status_code == 200
        assert (await client.post(PATH, json=BODY)).status_code == 200


async def test_a_page_of_another_name_gets_no_sweep_and_a_steered_server_names_its_steering():
    async with serving() as (site, client):
        await refused(client.post(PATH, json=BODY, headers={"host": "evil.example"}), 403)
        assert site.engine.calls == []
        site.engine.steering.set(base={"op": "steer", "vector": [1.0, 0.0, 0.0], "layer": 1})
        answer = await client.post(PATH, json=BODY)
        assert answer.headers["x-midstream-steering"].startswith("epoch=1")


class Faulty:
    """A script whose call of a number raises."""

    def __init__(self, engine, number, error):
        self._engine, self._number, self._error = engine, number, error

    def __call__(self, prompt, params, request_id):
        if len(self._engine.calls) >= self._number:
            return [self._error]
        return [SimpleNamespace(request_id=request_id, outputs=[])]


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (SpecError("layers", "wrong"), 400, "layers"),
        (BusyError("full", 7), 503, None),
        (ValueError("vLLM says no"), 400, None),
    ],
)
@pytest.mark.parametrize("number", [1, 9])
async def test_an_error_is_a_response_before_the_first_event_and_an_event_after(
    error, status, param, number
):
    async with serving() as (site, client):
        site.engine.script = Faulty(site.engine, number, error)
        answer = await client.post(PATH, json=BODY)
        if number == 1:
            assert answer.status_code == status
            found = answer.json()["error"]
        else:
            assert answer.status_code == 200
            *_, (name, value), done = events_of(answer.content)
            assert (name, done) == ("", ("[DONE]", None))
            found = value["error"]
        assert (found["code"], found["param"]) == (status, param)
        assert site.engine.running == site.server.sweeps.running == site.server.sweeps.sweeps == 0
        whole = await client.post(PATH, json={**BODY, "stream": False})
        assert whole.status_code == status


async def test_another_fault_is_an_event_without_its_text_and_is_logged():
    async with serving() as (site, client):
        site.engine.script = Faulty(site.engine, 9, RuntimeError("/secret/place"))
        answer = await client.post(PATH, json=BODY)
    assert b"/secret/place" not in answer.content
    assert events_of(answer.content)[-2][1]["error"]["code"] == 500


async def test_a_change_of_server_wide_steering_meanwhile_is_409():
    async with serving() as (site, client):
        steer = {"op": "steer", "vector": [1.0, 0.0, 0.0], "layer": 1}

        async def pause():
            if len(site.engine.calls) == 10:
                site.engine.steering.set(base=steer)

        site.engine.pause = pause
        answer = await client.post(PATH, json=BODY)
    names = [name for name, _ in events_of(answer.content)]
    assert "result" not in names
    assert events_of(answer.content)[-2][1]["error"]["code"] == 409


class Connection:
    """A client that sends a body and leaves when `gone` is set; `slow`: seconds of each `send`."""

    def __init__(self, body, path=PATH, slow=0.0):
        self.gone, self.sent, self._slow = asyncio.Event(), [], slow
        data = json.dumps(body).encode()
        self._messages = [{"type": "http.request", "body": data, "more_body": False}]
        self.scope = {**scope_of(str(len(data))), "path": path, "raw_path": path.encode()}

    async def receive(self):
        if self._messages:
            return self._messages.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await asyncio.sleep(self._slow)
        self.sent.append(message)

    def start(self, app):
        return asyncio.ensure_future(app(self.scope, self.receive, self.send))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_ends_the_remaining_cells(stream):
    async with serving() as (site, _):
        site.engine.limit_seats(4)  # one run at a time
        site.engine.pause = lambda: asyncio.sleep(0.002)
        client = Connection({**BODY, "stream": stream})
        answer = client.start(site.app)
        await until(lambda: len(site.engine.calls) >= 6)
        client.gone.set()
        await asyncio.wait_for(answer, 5)
        assert 6 <= len(site.engine.calls) < 20
        assert site.engine.running == site.server.sweeps.running == site.server.sweeps.sweeps == 0
        assert bool(client.sent) == stream
        metrics = site.server.metrics
        assert metrics._counters["sweeps"].labels("aborted")._value.get() >= 1


async def test_a_client_that_reads_nothing_loses_its_sweep():
    async with serving(stall_seconds=0.3) as (site, _):
        await asyncio.wait_for(Connection(BODY, slow=60).start(site.app), 10)
        assert site.engine.running == site.server.sweeps.sweeps == 0


async def test_a_server_that_stops_ends_the_stream_with_503():
    async with serving() as (site, _):
        go = asyncio.Event()

        async def pause():
            if len(site.engine.calls) > 6:
                await go.wait()

        site.engine.pause = pause
        client = Connection(BODY)
        answer = client.start(site.app)
        await until(lambda: len(site.engine.calls) > 6 and len(client.sent) > 1)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        events = events_of(b"".join(message.get("body", b"") for message in client.sent))
        assert events[-2][1]["error"]["code"] == 503
        assert events[-1] == ("[DONE]", None)
        assert site.engine.running == 0
