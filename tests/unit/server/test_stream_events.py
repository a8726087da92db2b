"""The events of a stream get the results of their choice, whatever shape vLLM gives them."""

import json

import pytest
from support.serving_fake import outputs_of, scores, serving

from midstream.errors import ControllerError, ReceiptError, SpecError
from midstream.http.sse import DONE, Events
from midstream.server.http_request import ChoiceUpdate, RequestContext
from midstream.server.request_field import MidstreamField
from midstream.server.response_writer import ResponseWriter

pytestmark = pytest.mark.anyio

SAYS_CHOICES = json.dumps('"choices":[{"index":0,')
CHUNK = '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":'
USAGE = '{"prompt_tokens":3,"total_tokens":4,"completion_tokens":1}'
TAKES = [  # chunks of vLLM with the only choice, however little is in it
    CHUNK + '[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
    '"finish_reason":null}],"prompt_token_ids":null}',
    CHUNK + '[{"index":0,"delta":{"content":' + SAYS_CHOICES + '},"finish_reason":null}]}',
    CHUNK + '[{"index":0,"delta":{},"finish_reason":null}],"usage":' + USAGE + "}",
    CHUNK + '[{"index":0,"delta":{"content":""},"finish_reason":"stop","stop_reason":"###"}]}',
    CHUNK + '[{"index":0,"delta":{"tool_calls":[{"id":"t","type":"function","index":0,"function":'
    '{"name":"f","arguments":' + SAYS_CHOICES + "}}]}}]}",
    '{"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":'
    '"","logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":[]}]}',
    '{"model": "spaced", "choices": [{"index": 0, "delta": {"content": "\\ud83d\\n"}}]}',
]
LEAVES = [  # events without a choice of the response
    CHUNK + '[],"usage":' + USAGE + "}",
    '{"text":' + SAYS_CHOICES + "}",
    '{"choices":[{"index":1,"delta":{"content":"x"}}]}',
    '["choices"]',
]


@pytest.mark.parametrize("data", [*TAKES, *LEAVES])
async def test_an_event_gets_the_results_of_its_choice_whatever_else_it_has(data):
    parts = [": ping\n\n", f"data: {data}\n\n", f"data: {data}\n\n", "data: [DONE]\n\n"]
    async with serving() as (site, _):
        _, *events, done = await written(site.server, parts)
    assert done.data == DONE
    if data in LEAVES:
        left = events.pop()
        assert left.value["midstream"]["probes"]["p"]["scores"] == [0.0, 0.125]
        assert (left.value["object"], left.value["choices"]) == ("midstream", [])
    else:
        first = events[0].value
        told = first.pop("midstream")
        assert told["probes"]["p"]["positions"] == [0, 1]
        assert told["probes"]["p"]["token_ids"] == [100, 101]
        assert first == json.loads(data)
    # An event that nothing is put into goes out as it came.
    assert [one.raw for one in events[data in TAKES :]] == [f"data: {data}\n\n".encode()] * (
        2 - (data in TAKES)
    )


async def test_a_chunk_of_one_of_several_choices_gets_its_own_results_inside_the_choice():
    chunk = CHUNK + '[{"index":0,"delta":{"content":"x"}}]}'
    async with serving() as (site, _):
        event, left, done = await written(
            site.server, [f"data: {chunk}\n\n", "data: [DONE]\n\n"], per_call=2
        )
    assert done.data == DONE
    [choice] = event.value["choices"]
    assert choice["midstream"]["probes"]["p"]["scores"] == [0.0, 0.125]
    [other] = left.value["choices"]
    assert (other["index"], other["midstream"]["probes"]["p"]["scores"]) == (1, [0.0, 0.125, 0.25])


FAILURES = [
    (SpecError("capture[0].layers[0]", "there is no layer 9"), 400, "midstream.capture.layers[0]"),
    (ReceiptError("0 of 5 rows"), 500, None),
    (ControllerError("it took too long"), 500, None),
]


@pytest.mark.parametrize(("error", "status", "param"), FAILURES)
@pytest.mark.parametrize("is_late", [False, True])
async def test_what_fails_in_a_stream_of_a_response_is_told_in_it(error, status, param, is_late):
    # vLLM has sent events before it asks the engine, and lets such an error pass.
    async with serving() as (site, client):
        site.engine.script = lambda *given: [*outputs_of(*given)[: 2 * is_late], error]
        asked = {"capture": {"layers": [1]}}
        answer = await client.post(
            "/v1/responses", json={"input": "abc", "stream": True, "midstream": asked}
        )
        assert site.engine.running == 0
    created, last, done = Events().feed(answer.content)
    assert (created.name, done.data) == (b"response.created", DONE)
    told = last.value["error"]
    assert (told["code"], told["param"]) == (status, param)
    assert str(error).rpartition(": ")[2] in told["message"]


async def written(server, parts, per_call=1):
    """The events of a stream, after its choices had 2 scores, 3 scores, …"""
    sent = []

    async def send(message):
        sent.append(message)

    context = RequestContext(MidstreamField(None, "none"), "client", calls=1, per_call=per_call)
    for choice in range(per_call):
        context.updates[choice] = ChoiceUpdate(probes=scores(["p"], 2 + choice))
    writer = ResponseWriter(context, server, send, lambda status, field: None)
    headers = [(b"content-type", b"text/event-stream")]
    await writer({"type": "http.response.start", "status": 200, "headers": headers})
    for part in parts:
        await writer({"type": "http.response.body", "body": part.encode(), "more_body": True})
    await writer({"type": "http.response.body", "body": b"", "more_body": False})
    return Events().feed(b"".join(one.get("body", b"") for one in sent))
