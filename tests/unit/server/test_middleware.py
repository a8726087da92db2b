"""What is midstream's is taken out of requests; all else reaches vLLM as it was sent."""

import contextlib
import json
import threading

import pytest
from starlette.responses import JSONResponse
from support.serving_fake import Params, make, scope_of, serving
from unit.server.asgi import raw_request

from midstream.errors import HttpError, SpecError
from midstream.plan import Capture, Plan
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.server import middleware
from midstream.server.body_values import MAX_VALUES
from midstream.server.middleware import Middleware

pytestmark = pytest.mark.anyio
CAPTURE = {"layers": [1]}
ASKS = {"capture": CAPTURE, "activations": "inline"}
JSON = {"content-type": "application/json"}


async def ignore(message):
    """Nobody receives it."""


def given(body):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def post(client, body, path="/v1/completions", **more):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await client.post(path, content=content, headers=JSON, **more)


async def test_the_field_is_taken_out_and_the_plan_goes_with_the_call():
    async with serving() as (site, client):
        answer = await post(client, {"prompt": "abc", "max_tokens": 3, "midstream": ASKS})
    assert answer.status_code == 200
    assert site.seen == [{"prompt": "abc", "max_tokens": 3}]
    ((_, params, _),) = site.engine.calls
    assert params.extra_args["midstream"].plan == Plan((Capture([1]),))
    assert answer.json()["midstream"]["receipt"]["request_id"] == "cmpl-0"


async def test_a_byte_order_mark_in_front_of_a_body_changes_nothing():
    body = json.dumps({"prompt": "abc", "max_tokens": 3, "midstream": ASKS})
    async with serving() as (site, client):
        answers = [await post(client, body.encode(coding)) for coding in ("utf-8", "utf-8-sig")]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert site.seen == [{"prompt": "abc", "max_tokens": 3}] * 2
    assert all("receipt" in answer.json()["midstream"] for answer in answers)


@pytest.mark.parametrize(
    "twice",
    [
        '"prompt": "x", "prompt": "y"',
        '"prompt": "x", "a": {"b": [{"c": 1, "d": 2, "c": 1}]}',
        '"prompt": ":", "a": {"b": "\\u003a", "b": 1}',
        '"prompt": "\\u003a", "a": 1, "a": 1',
    ],
)
async def test_no_field_of_a_body_may_occur_twice(twice):
    body = f'{{{twice}, "max_tokens": 3, "midstream": {json.dumps(ASKS)}}}'
    async with serving() as (site, client):
        answer = await post(client, body.encode())
    assert answer.status_code == 400
    assert "duplicate JSON field" in answer.json()["error"]["message"]
    assert not site.seen


@pytest.mark.parametrize(
    "value",
    [
        "-0", "-0.0", "1E5", "1e400", "-1e400", "5e-324", "0.1", "1.7976931348623157e308",
        "9007199254740993.0", "123456789012345678901234567890", "-9223372036854775809", "[]", "{}",
        '"\\ud800"', '"\\u003a:"', '"\\/\\n"', '"é😀 "', '{"": {"a:b": null}}', "[true, 1, 1.0]",
    ],
)  # fmt: skip
def test_vllm_gets_what_python_reads_of_a_body(value):
    body = f'{{"x": {value}, "midstream": {json.dumps(ASKS)}, "y": [{value}]}}'.encode()
    parsed = middleware._parse("/v1/completions", frozenset(), body)
    read = json.loads(parsed.body)
    assert repr(read.pop("vllm_xargs")) == repr({"midstream": parsed.id})
    wanted = json.loads(body)
    del wanted["midstream"]
    assert repr(read) == repr(wanted) == repr({name: parsed.value[name] for name in wanted})


async def test_a_chats_plan_knows_its_messages_and_template():
    messages = [{"role": "user", "content": "hi"}]
    async with serving() as (site, client):
        await post(
            client,
            {"messages": messages, "chat_template": "x", "add_generation_prompt": None,
             "midstream": ASKS},
            "/v1/chat/completions",
        )  # fmt: skip
    ((_, params, _),) = site.engine.calls
    carried = params.extra_args["midstream"]
    assert isinstance(carried, CallPlan)
    assert (carried.messages, carried.template) == (messages, {"chat_template": "x"})


PLAIN = {
    "without it": b'{"prompt": "abc",\n "temperature": 1.50}',
    "the word as text": b'{"prompt": "midstream", "note": "\\"midstream\\""}',
    "the word within": b'{"prompt": "x", "metadata": {"midstream": {"capture": 1}}}',
    "escapes": b'{"prompt": "\\u0061\\ud83d"}',
    "other bytes": b'{"prompt": "\\u0000 \xe2\x82\xac"}',
    "the word, later taken back": b'{"prompt": "x", "vllm_xargs": {"a": 1}}',
}


@pytest.mark.parametrize("body", PLAIN.values(), ids=PLAIN)
async def test_a_body_that_does_not_ask_reaches_vllm_byte_by_byte(body):
    site = await make()
    seen = []

    async def noting(scope, receive, send):
        message = await receive()
        seen.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    await Middleware(noting, site.server)(scope_of(), given(body), ignore)
    assert seen == [body]


SPELT = {
    "escaped": b'{"prompt": "abc", "m\\u0069dstream": {"capture": 3.5}}',
    "in capitals": b'{"prompt": "abc", "\\u006Didstream": {"capture": 3.5}}',
    "escaped in xargs": b'{"vllm_xargs": {"midstrea\\u006d": "{"}}',
    "after white space": b'\n\t {"prompt": "abc", "midstream"\n:3}',
    "UTF-16": json.dumps({"prompt": "a", "midstream": ASKS}).encode("utf-16"),
    "UTF-16 without mark": json.dumps({"prompt": "a", "midstream": ASKS}).encode("utf-16-be"),
    "UTF-32": json.dumps({"prompt": "a", "midstream": ASKS}).encode("utf-32"),
    "twice": b'{"midstream": {}, "prompt": "abc", "midstream": {}}',
    "another field twice": b'{"midstream": {}, "prompt": "abc", "prompt": "abd"}',
    "in the first of two xargs": b'{"vllm_xargs": {"midstream": "{}"}, "vllm_xargs": {"a": 1}}',
    "as null in xargs, then none": b'{"vllm_xargs": {"midstream": null}, "vllm_xargs": null}',
    "twice in xargs": b'{"vllm_xargs": {"midstream": "{}", "midstream": null, "a": 1}}',
    "NaN elsewhere": b'{"midstream": {}, "prompt": "abc", "temperature": NaN}',
    "both places": b'{"midstream": {}, "vllm_xargs": {"midstream": "{}"}}',
    "null": b'{"midstream": null}',
    "beam search": b'{"prompt": "a", "use_beam_search": true, "midstream": {}}',
    "in the background": b'{"prompt": "a", "background": true, "midstream": {}}',
    "an integer of a million digits": b'{"midstream": {"capture": {"layers": ['
    + b"9" * 1_000_000
    + b"]}}}",
}


@pytest.mark.parametrize("body", SPELT.values(), ids=SPELT)
async def test_however_it_is_spelt_it_is_never_passed_over(body):
    async with serving() as (site, client):
        answer = await post(client, body)
    assert (site.engine.calls, site.seen) == ([], [])
    assert answer.status_code == 400


async def test_depths_are_refused_and_break_nothing():
    async with serving() as (site, client):
        answers = {}
        # Just below the depth that Python reads, it may yet be too deep to be written.
        for depth in (50, *range(700, 1000, 7), 100_000):
            deep = b"[" * depth + b"]" * depth
            body = b'{"prompt": "abc", "midstream": {}, "x": ' + deep + b"}"
            answers[depth] = (await post(client, body)).status_code
    assert answers.pop(50) == 200
    assert answers.pop(100_000) == 400
    assert set(answers.values()) <= {200, 400}
    assert len(site.seen) == len(site.engine.calls)


def test_a_field_of_any_depth_is_refused_or_cannot_be_read():
    # The depth at which Python gives up depends on the depth of its own calls.
    for depth in range(1, 1100):
        body = b'{"prompt": "abc", "midstream": ' + b"[" * depth + b"]" * depth + b"}"
        with contextlib.suppress(SpecError, HttpError):
            assert middleware._parse("/v1/completions", None, body) is None


@pytest.mark.parametrize("path", ["/v1/completions/", "/v2/completions", "/none"])
async def test_a_path_that_is_no_endpoints_gives_no_answer_and_its_body_is_not_read(path):
    async with serving() as (site, _):
        sent, taken = await raw_request(site.app, path=path)
    assert (sent[0]["status"] in (307, 404), taken) == (True, 0)
    assert site.engine.calls == []


async def test_elsewhere_it_is_refused_with_the_paths_that_can():
    async with serving() as (site, client):
        answer = await post(client, {"prompt": "abc", "midstream": ASKS}, "/v1/embeddings")
        assert (await post(client, {"input": "abc"}, "/v1/embeddings")).status_code == 200
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "use /v1/completions, /v1/chat/completions, /v1/responses" in error["message"]
    assert error["param"] == "midstream"
    assert site.seen == [{"input": "abc"}]


async def test_a_plan_that_goes_past_the_middleware_is_refused():
    async with serving() as (site, _):
        for extra in ({"midstream": {"capture": CAPTURE}}, {"output_residual_stream": [1]}):
            with pytest.raises(ValueError, match="this endpoint cannot return results"):
                site.engine.generate("abc", Params(extra_args=extra), "r")
        with pytest.raises(ValueError, match="did you mean `midstream`"):
            site.engine.generate("abc", Params(extra_args={"midstreem": {}}), "r")
        assert site.engine.calls == []
        plain = [each async for each in site.engine.generate("abc", Params(), "r")]
        assert len(plain) == 3


async def test_before_the_engine_is_there_it_is_503():
    site = await make()
    site.server._llm = None
    async with site.client() as client:
        answer = await post(client, {"prompt": "abc", "midstream": ASKS})
        assert answer.status_code == 503
        assert (await post(client, {"prompt": "abc"})).status_code == 200


async def test_a_body_is_refused_by_its_header_before_it_is_read():
    async with serving(max_body_bytes=100) as (site, client):
        for path in ("/v1/completions", "/v1/embeddings", "/v1/midstream/steering"):
            answer = await post(client, b"{" + b" " * 99 + b"}", path)
            assert answer.status_code == 413
            assert "100 bytes" in answer.json()["error"]["message"]
        assert (await post(client, b'{"prompt": "abc"}'.ljust(100))).status_code == 200
    assert len(site.seen) == 1


@pytest.mark.parametrize("length", ["9" * 5000, "1" * 30, "101"])
async def test_any_length_in_the_header_is_understood(length):
    site = await make(max_body_bytes=100)
    sent, taken = await raw_request(site.app, length=length)
    assert (sent[0]["status"], taken) == (413, 0)


async def test_chunks_are_refused_as_soon_as_they_are_too_many():
    taken = 0

    async def chunks():
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield b" " * 10

    async with serving(max_body_bytes=100) as (site, client):
        answer = await client.post("/v1/completions", content=chunks(), headers=JSON)
    assert answer.status_code == 413
    assert taken < 20
    assert site.seen == []


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("kind", "part", "status"),
    [
        ("multipart/form-data", 'form-data; name="midstream"', 400),
        ("Multipart/Form-Data", 'form-data; name="midstream"', 400),
        ("multipart/form-data", "form-data; Name=midstream", 400),
        ("multipart/form-data", "form-data; name=midstream; x=y", 400),
        ("multipart/form-data", 'form-data; name="file"; filename="midstream"', 200),
        ("multipart/form-data", 'form-data; name="midstreamer"', 200),
    ],
)
async def test_the_field_in_a_form_is_refused_however_it_is_written(kind, part, status, size):
    whole = f"--x\r\nContent-Disposition: {part}\r\n\r\n{{}}\r\n--x--\r\n".encode()
    seen = []

    async def upload(request):
        async with request.form() as form:
            seen.extend(form)
        return JSONResponse({})

    async def parts():
        for at in range(0, len(whole), size):
            yield whole[at : at + size]

    async with serving() as (site, client):
        site.app.add_route("/v1/audio/transcriptions", upload, methods=["POST"])
        headers = {"content-type": f"{kind}; boundary=x"}
        answer = await client.post("/v1/audio/transcriptions", content=parts(), headers=headers)
    assert answer.status_code == status, answer.text
    assert len(seen) == (status == 200)


async def test_the_answer_to_a_name_as_long_as_a_body_is_short():
    async with serving() as (_, client):
        body = {"prompt": "a", "source": 0, "metric": "kl", "x" * 100_000: 1}
        answer = await client.post("/v1/midstream/sweep", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("xxx")
    assert len(answer.content) < 5000


@pytest.mark.parametrize("mark", ["midstream", "midstrea\\u006d"])
async def test_more_numbers_than_a_plan_may_have_are_413_and_stop_nobody(mark):
    numbers = ",".join(["0.25"] * (MAX_VALUES + 2))
    body = f'{{"prompt": "abc", "{mark}": {{"edits": [[{numbers}]]}}}}'.encode()
    async with serving() as (site, client):
        answer = await post(client, body)
        assert answer.status_code == 413
        assert "base64" in answer.json()["error"]["message"]
    assert site.seen == []


async def test_a_long_body_is_parsed_in_a_thread(monkeypatch):
    threads, parse = [], middleware._parse

    def noting(*given):
        threads.append(threading.get_ident())
        return parse(*given)

    monkeypatch.setattr(middleware, "_parse", noting)
    async with serving() as (_, client):
        for length in (1, 1 << 19):
            body = {"prompt": "a" * length, "midstream": {}}
            assert (await post(client, body)).status_code == 200
    here = threading.get_ident()
    assert [one == here for one in threads] == [True, False]


@pytest.mark.parametrize(
    "member",
    [
        '"text": "caf\\u00e9 ☕ \\n"',
        '"a": [1.50, {"b": 1e2}]',
        '"long": "' + "ab☕" * 500_000 + '"',
    ],
    ids=["escapes", "numbers", "long"],
)
def test_members_of_a_long_body_that_did_not_change_keep_their_text(member, monkeypatch):
    written, dumps = [], json.dumps

    def noted(value, **options):
        written.append(value)
        return dumps(value, **options)

    monkeypatch.setattr(json, "dumps", noted)
    field = '{"capture": {"layers": [1]}}'
    member = f'"pad": "{" " * (1 << 16)}", {member}'
    body = f' {{ {member} ,"midstream":{field}, "vllm_xargs": {{"k": 1}}, "n" : 2}} '.encode()
    parsed = middleware._parse("/v1/completions", frozenset(), body)
    monkeypatch.undo()
    own = f'"vllm_xargs": {dumps({"k": 1, "midstream": parsed.id})}'
    assert parsed.body.decode() == f'{{{member}, {own}, "n": 2}}'
    assert json.loads(parsed.body) == parsed.value
    longest = max(len(dumps(one)) for one in written)
    assert longest < 100, "nothing else runs in the process while a long value is written"


def test_a_short_body_is_written_with_the_same_values():
    sent = {"text": "café ☕ \n", "a": [1.5, {"b": 1e300}], "n": 2, "vllm_xargs": {"k": 1}}
    body = json.dumps({**sent, "midstream": {"capture": {"layers": [1]}}}).encode()
    parsed = middleware._parse("/v1/completions", frozenset(), body)
    sent["vllm_xargs"]["midstream"] = parsed.id
    assert json.loads(parsed.body) == parsed.value == sent


async def test_a_client_that_leaves_while_it_sends_leaves_nothing():
    site = await make()
    messages = [
        {"type": "http.request", "body": b'{"prompt"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent = []

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    await site.app(scope_of(), receive, send)
    assert sent[0]["status"] == 400
    assert site.seen == []
