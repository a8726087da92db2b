"""Results are put on answers: one body or events, one choice or several, or why there are none."""

import asyncio
import base64
import json
from types import SimpleNamespace

import pytest
import torch
from support.open_files import open_files
from support.serving_fake import completion, outputs_of, rows, scope_of, scores, serving
from unit.server.asgi import raw_request

from midstream.errors import BusyError, SpecError
from midstream.http.sse import DONE, Events
from midstream.results.receipt import CaptureResult, Receipt
from midstream.results.serialization import unpack

pytestmark = pytest.mark.anyio
PROBE = {"direction": [1, 0, 0], "layer": 1, "name": "p"}
INLINE = {"capture": {"layers": [1]}, "activations": "inline"}
HANDLE = {"capture": {"layers": [1]}}
PATH = "/v1/completions"


async def ask(client, midstream, path=PATH, **body):
    what = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "abc"}
    return await client.post(path, json={**what, **body, "midstream": midstream})


async def stream(client, midstream, path=PATH, **body):
    """The events' values; DONE where it is that."""
    async with client.stream(
        "POST", path, json={"prompt": "abc", "stream": True, **body, "midstream": midstream}
    ) as answer:
        assert answer.status_code == 200
        events = Events()
        found = [one async for data in answer.aiter_bytes() for one in events.feed(data)]
    assert events.rest == b""
    return [DONE if one.data == DONE else one.value for one in found if one.data]


def rows_in(told):
    return unpack(base64.b64decode(told["base64"]))


async def until(holds):
    for _ in range(200):
        await asyncio.sleep(0.01)
        if holds():
            return
    pytest.fail("it never came to hold")


async def test_numbers_that_json_has_not_have_names():
    def script(prompt, params, request_id):
        given = scores(["p"], 3)
        given["p"][:] = torch.tensor([float("nan"), float("inf"), -float("inf")])
        return [output(completion(probes=given, receipt=Receipt(request_id, 1, 1, (), None)))]

    async with serving() as (site, client):
        site.engine.script = script
        answer = await ask(client, {"probes": PROBE})
    assert b"NaN" not in answer.content.replace(b'"NaN"', b"")
    told = answer.json()["midstream"]["probes"]["p"]["scores"]
    assert told == ["NaN", "Infinity", "-Infinity"]


async def test_what_became_of_rows_at_sinks_is_told():
    kept = {"store": CaptureResult("partial", "no disk", ("/srv/a",)), "memory": CaptureResult()}

    def script(prompt, params, request_id):
        return [
            output(completion(receipt=Receipt(request_id, 1, 1, (), None), capture_results=kept))
        ]

    async with serving() as (site, client):
        site.engine.script = script
        told = (await ask(client, HANDLE)).json()["midstream"]
    assert told["captures"] == {
        "store": {"status": "partial", "reason": "no disk", "paths": ["/srv/a"]}
    }


async def test_more_than_an_answer_may_have_is_413():
    async with serving(inline_bytes=139) as (_, client):
        answer = await ask(client, INLINE)
        assert answer.status_code == 413
        error = answer.json()["error"]
        assert "140 bytes" in error["message"]
        assert error["param"] == "midstream.activations"
    async with serving(inline_bytes=140) as (_, client):
        assert (await ask(client, INLINE)).status_code == 200


async def test_no_room_is_said_before_anything_is_computed():
    async with serving(client_captures=1) as (site, client):
        assert (await ask(client, HANDLE)).status_code == 200
        assert (await ask(client, HANDLE)).status_code == 429
        assert len(site.engine.calls) == 1
        assert (await ask(client, INLINE)).status_code == 200
    async with serving(held_captures=1) as (site, client):
        assert (await ask(client, HANDLE)).status_code == 200
        assert (await ask(client, HANDLE)).status_code == 507


async def test_of_an_answer_that_is_refused_nothing_stays_held():
    async with serving() as (site, client):
        before = open_files()
        [size] = [held.nbytes for held in await held_after(site, client)]
    async with serving(client_bytes=4 * size - 1) as (site, client):
        # Three of the four choices have room.
        answer = await ask(client, HANDLE, n=4)
        assert answer.status_code == 429
        assert len(site.engine.calls) == 1
        assert (len(site.server.captures), open_files() - before) == (0, set())
        assert not site.server.captures._of_client


async def held_after(site, client):
    assert (await ask(client, HANDLE)).status_code == 200
    return site.server.captures.of_client("127.0.0.1")


async def test_what_the_engine_refuses_is_as_the_client_wrote_it():
    async with serving() as (site, client):
        site.engine.script = lambda *_: [SpecError("edits[0].layer", "there is no layer 9")]
        answer = await ask(client, {"steer": {"vector": [1, 0, 0], "layer": 9}})
    assert answer.status_code == 400
    assert "midstream.steer.layer: there is no layer 9" in answer.json()["error"]["message"]


async def test_an_answer_that_is_none_stays_as_it_is():
    async with serving() as (site, client):
        site.engine.script = lambda *_: [ValueError("no")]
        answer = await ask(client, HANDLE)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no")
    assert int(answer.headers["content-length"]) == len(answer.content)


async def test_vllms_answer_null_to_a_client_that_has_gone_stays_and_leaves_nothing():
    async with serving() as (site, client):
        before = open_files()
        answer = await ask(client, HANDLE, gone=True)
        assert (answer.status_code, answer.content) == (200, b"null")
        assert (len(site.server.captures), open_files() - before) == (0, set())


async def test_a_stream_without_activations_at_its_end_has_all_streamed_rows():
    def script(prompt, params, request_id):
        every = outputs_of(prompt, params, request_id)
        for nth, one in enumerate(every):
            last = nth == len(every) - 1
            count = len(prompt) + nth
            one.outputs[0].activations = rows((1,), count, 0 if last or not nth else count - 1)
        return every

    asked = {"capture": {"layers": [1, -4], "stream": True}, "activations": "none"}
    async with serving() as (site, client):
        site.engine.script = script
        *tokens, _ = await stream(client, asked)
    told = [event["midstream"] for event in tokens]
    found = torch.cat([rows_in(one)["resid_post", 1] for each in told for one in each["rows"]])
    assert torch.equal(found, rows((1,), 5)["resid_post", 1])
    assert all("activations" not in one for one in told)


async def test_where_a_comment_went_out_before_it_the_error_is_an_event():
    async with serving() as (site, client):
        site.engine.script = lambda *_: [SpecError("", "no")]
        error, done = await stream(client, HANDLE, comment="wait")
    assert (error["error"]["code"], done) == (400, DONE)


async def test_an_error_in_mid_stream_is_an_event_and_ends_it():
    async with serving(inline_bytes=1) as (site, client):
        asked = {"capture": {"layers": [1], "stream": False}, "activations": "inline"}
        *tokens, error, done = await stream(client, asked)
        assert site.engine.running == 0
    assert len(tokens) == 2
    assert done == DONE
    assert error["error"]["code"] == 413


async def test_a_request_that_is_cancelled_while_its_rows_are_packed_leaves_nothing(monkeypatch):
    from midstream.server import results_json as answers

    pack, packing = answers.pack, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*given):
        loop.call_soon_threadsafe(packing.set)
        asyncio.run(asyncio.sleep(0.1))
        return pack(*given)

    monkeypatch.setattr(answers, "pack", slow)
    async with serving() as (site, client):
        before = open_files()
        task = asyncio.ensure_future(ask(client, HANDLE))
        await packing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: (len(site.server.captures), open_files() - before) == (0, set()))


def busy(*_):
    return [BusyError("3 requests wait", retry_after=7)]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_without_capacity_is_503_with_the_time_to_try_again(stream):
    async with serving() as (site, client):
        site.engine.script = busy
        answer = await ask(client, HANDLE, stream=stream)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
        assert answer.json()["error"]["message"] == "3 requests wait"
        site.engine.script = None
        assert (await ask(client, HANDLE, stream=stream)).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_that_the_server_aborts_is_an_error_and_no_answer_without_receipt(
    is_stream,
):
    def script(*given):
        first, *_ = outputs_of(*given)
        first.outputs[0].finish_reason = "abort"
        return [first]

    async with serving() as (site, client):
        site.engine.script = script
        if is_stream:
            *_, error, done = await stream(client, HANDLE)
            assert (error["error"]["code"], done) == (503, DONE)
        else:
            assert (await ask(client, HANDLE)).status_code == 503


async def test_a_server_that_is_stopped_ends_a_stream_with_an_error_event():
    async with serving() as (site, _):
        sent, begun = [], asyncio.Event()

        async def send(message):
            sent.append(message)
            if len(sent) == 2:
                begun.set()
                site.engine.pause = lambda: asyncio.sleep(60)

        task = asyncio.ensure_future(site.app(scope_of(), once(HANDLE), send))
        await begun.wait()
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    found = Events().feed(b"".join(one.get("body", b"") for one in sent))
    assert found[-2].value["error"]["code"] == 503
    assert (found[-1].data, sent[-1]["more_body"]) == (DONE, False)


async def test_a_client_that_reads_nothing_of_its_stream_loses_its_request():
    async with serving(stall_seconds=0.3) as (site, _):
        before, body = open_files(), {"prompt": "abc", "stream": True, "midstream": HANDLE}
        answer = raw_request(site.app, [json.dumps(body).encode()], stays=True, reads=2)
        sent, _ = await asyncio.wait_for(answer, 20)
        assert len(sent) == 2
        await until(lambda: site.engine.running == 0)
        assert (len(site.server.captures), open_files() - before) == (0, set())


def once(midstream):
    messages = [body_of({"prompt": "abc", "stream": True, "midstream": midstream})]

    async def receive():
        if messages:
            return messages.pop()
        return await asyncio.Event().wait()

    return receive


def output(*completions):
    return SimpleNamespace(request_id="cmpl-0", outputs=list(completions), finished=True)


def body_of(value):
    return {"type": "http.request", "body": json.dumps(value).encode(), "more_body": False}


@pytest.mark.parametrize(("how", "most"), [("inline", 7), ("handle", 5), ("none", None)])
async def test_a_call_knows_how_many_bytes_can_be_returned(how, most):
    async with serving(inline_bytes=7, client_bytes=5, held_bytes=6) as (site, client):
        await ask(client, {**HANDLE, "activations": how})
    [(_, params, _)] = site.engine.calls
    assert params.extra_args["midstream"].most_bytes == most
