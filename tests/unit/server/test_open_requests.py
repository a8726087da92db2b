"""An engine call has the plan of the request whose id it carries, as long as that is open."""

import json
from typing import Any

import pytest
from support.serving_fake import Params, Site, make, serving
from unit.server.asgi import body_of, raw_request

from midstream.http.sse import DONE, Events
from midstream.plan import Capture, Plan
from midstream.server.http_request import RequestContext
from midstream.server.middleware import Middleware
from midstream.server.open_requests import OpenRequests, carry_id
from midstream.server.request_field import MidstreamField

pytestmark = pytest.mark.anyio
ASKS = {"capture": {"layers": [1]}, "activations": "inline"}


def context(client: str) -> RequestContext:
    return RequestContext(MidstreamField(None, "none"), client)


def test_a_call_has_the_context_of_the_id_that_it_carries_and_only_while_that_is_open():
    requests, first, second = OpenRequests(), context("a"), context("b")
    with requests.opened("x", first):
        with requests.opened("y", second):
            assert requests.find(Params(extra_args={"midstream": "x", "other": 1})) is first
            assert requests.find(Params(extra_args={"midstream": "y"})) is second
        for extra_args in (None, {}, {"other": "x"}, {"midstream": "y"}, {"midstream": ["x"]}):
            assert requests.find(Params(extra_args=extra_args)) is None
    assert requests.find(Params(extra_args={"midstream": "x"})) is None
    assert len(requests) == 0


def test_ids_are_new_and_leave_other_arguments_as_they_are():
    bodies: list[dict[str, Any]] = [{}, {"vllm_xargs": None}, {"vllm_xargs": {"a": 1}}]
    names = [carry_id(body) for body in bodies * 50]
    assert len(set(names)) == len(names)
    assert min(map(len, names)) >= 32
    assert bodies[2]["vllm_xargs"] == {"a": 1, "midstream": names[-1]}
    wrong = {"vllm_xargs": [1]}
    carry_id(wrong)
    assert wrong == {"vllm_xargs": [1]}  # which vLLM rejects


async def answered(site: Site, app: Any, body: bytes) -> tuple[int, bytes]:
    sent, _ = await raw_request(Middleware(app, site.server), [body])
    return sent[0]["status"], body_of(sent)


async def test_the_id_of_a_request_is_of_no_use_to_another_one_nor_after_its_end():
    site, ids = await make(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = json.loads((await receive())["body"])
        ids.append(body["vllm_xargs"]["midstream"])
        async with site.client() as client:
            # A client that has learnt the id cannot send it.
            for extra in ({"vllm_xargs": body["vllm_xargs"]}, {"midstream": ids[0]}):
                other = await client.post("/v1/completions", json={"prompt": "a", **extra})
                assert other.status_code == 400
        assert site.engine.calls == []
        carried = Params(extra_args=dict(body["vllm_xargs"]))
        async for _ in site.engine.generate("abc", carried, "r"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"choices": []}'})

    body = json.dumps({"prompt": "abc", "midstream": ASKS}).encode()
    assert (await answered(site, app, body))[0] == 200
    ((_, params, _),) = site.engine.calls
    assert params.extra_args["midstream"].plan == Plan((Capture([1]),))
    with pytest.raises(ValueError, match="midstream"):
        site.engine.generate("abc", Params(extra_args={"midstream": ids[0]}), "r")
    assert len(site.engine.calls) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_without_an_engine_call_of_its_plan_is_an_error(stream: bool):
    site = await make()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        async for _ in site.engine.generate("abc", Params(), "r"):
            pass
        kind = b"text/event-stream" if stream else b"application/json"
        content = b'data: {"id":"c","choices":[]}\n\ndata: [DONE]\n\n' if stream else b'{"id":"c"}'
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    body = json.dumps({"prompt": "abc", "midstream": ASKS}).encode()
    status, content = await answered(site, app, body)
    if stream:
        _, error, done = Events().feed(content)
        assert done.data == DONE
        assert error.value["error"]["code"] == 500
        content = error.data
    else:
        assert status == 500
    assert b"no engine call with this request's plan" in content


async def test_a_request_whose_field_asks_for_nothing_has_no_plan_and_no_id_in_its_call():
    async with serving() as (site, client):
        xargs = {"vllm_xargs": {"other": 1}}
        for extra, left in (({}, None), (xargs, {"other": 1})):
            body = {"prompt": "abc", "midstream": {}, **extra}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            assert site.engine.calls[-1][1].extra_args == left
