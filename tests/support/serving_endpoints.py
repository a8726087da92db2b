"""vLLM's endpoints in front of a fake engine, as far as tests call them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette import exceptions

from midstream.config.config import KEY

if TYPE_CHECKING:
    from support.serving_fake import Site


@dataclass
class Params:
    """As vLLM's sampling params, as far as midstream looks at them."""

    n: int = 1
    extra_args: dict[str, Any] | None = None
    output_kind: Any = field(default_factory=lambda: SimpleNamespace(name="DELTA"))

    def clone(self) -> Params:
        return replace(self)


def add_endpoints(site: Site) -> None:
    """Add them to a site's app."""

    async def failed(request: Request, error: Any) -> Any:
        content = {"message": str(error.detail), "type": "", "param": None}
        return JSONResponse({"error": {**content, "code": error.status_code}}, error.status_code)

    site.app.add_exception_handler(exceptions.HTTPException, failed)

    async def completions(request: Request) -> Any:
        return await _answer(site, request, "prompt")

    async def chat(request: Request) -> Any:
        return await _answer(site, request, "messages")

    async def responses(request: Request) -> Any:
        body = await _seen(site, request)

        async def turns() -> None:
            for nth in range(body.get("turns", 1)):
                params = Params(extra_args=_extra_args(body))
                own = _id_of(request, "resp", nth)
                async for _ in site.engine.generate(body["input"], params, own):
                    pass

        value = {"id": "resp", "object": "response", "output": []}
        if not body.get("stream"):
            await turns()
            return JSONResponse(value)
        last = json.dumps({"type": "response.completed", "response": value})

        async def events() -> AsyncIterator[str]:
            yield 'event: response.created\ndata: {"type": "response.created"}\n\n'
            await turns()
            yield f"event: response.completed\ndata: {last}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def messages(request: Request) -> Any:
        body = await _seen(site, request)
        params = Params(extra_args=_extra_args(body))
        text = ""
        prompt = body["messages"][-1]["content"]
        async for output in site.engine.generate(prompt, params, _id_of(request, "msg", 0)):
            text += output.outputs[0].text
        return JSONResponse({"type": "message", "content": [{"type": "text", "text": text}]})

    async def embeddings(request: Request) -> Any:
        await _seen(site, request)
        return JSONResponse({"data": []})

    async def health(_request: Request) -> Any:
        return Response()

    for path, endpoint in (
        ("/v1/completions", completions),
        ("/v1/chat/completions", chat),
        ("/v1/responses", responses),
        ("/v1/messages", messages),
        ("/v1/embeddings", embeddings),
    ):
        site.app.add_route(path, endpoint, methods=["POST"])
    site.app.add_route("/health", health, methods=["GET"])


async def _seen(site: Site, request: Request) -> Any:
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        # As FastAPI has it.
        raise HTTPException(400, "There was an error parsing the body") from None
    site.seen.append(_as_sent(body))
    return body


def _as_sent(body: Any) -> Any:
    """Return a body without the id by which midstream finds the request of an engine call."""
    xargs = body.get("vllm_xargs") if isinstance(body, dict) else None
    if not isinstance(xargs, dict) or not isinstance(xargs.get(KEY), str):
        return body
    others = {name: value for name, value in xargs.items() if name != KEY}
    rest = {name: value for name, value in body.items() if name != "vllm_xargs"}
    return {**rest, "vllm_xargs": others} if others else rest


def _extra_args(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return what vLLM makes of `vllm_xargs`."""
    return dict(body.get("vllm_xargs") or {}) or None


def _id_of(request: Request, kind: str, nth: int) -> str:
    """Return vLLM's id of an engine call: the client's, if it gives one, with a number."""
    own = request.headers.get("x-request-id")
    return f"{kind}-{nth}" if own is None else f"{kind}-{own}-{nth}"


async def _answer(site: Site, request: Request, what: str) -> Any:
    body = await _seen(site, request)
    given = body[what]
    prompts = ["chat"] if what == "messages" else given if isinstance(given, list) else [given]
    count = body.get("n", 1)
    calls = [
        site.engine.generate(prompt, Params(count, _extra_args(body)), _id_of(request, "cmpl", nth))
        for nth, prompt in enumerate(prompts)
    ]
    if body.get("stream"):
        return StreamingResponse(
            _events(calls, count, body),
            media_type="text/event-stream",
        )
    choices = []
    for nth, call in enumerate(calls):
        texts = [""] * count
        try:
            async for output in call:
                for one in output.outputs:
                    texts[one.index] += one.text
        except ValueError as error:
            return JSONResponse(_error(error), 400)
        choices += [
            {"index": nth * count + index, "text": text, "finish_reason": "length"}
            for index, text in enumerate(texts)
        ]
    if body.get("gone"):
        # As vLLM answers a client that has gone away.
        return JSONResponse(None)
    return JSONResponse({"id": "cmpl", "object": "text_completion", "choices": choices})


async def _events(calls: list[Any], count: int, body: dict[str, Any]) -> AsyncIterator[str]:
    if "comment" in body:
        yield f": {body['comment']}\n\n"
    # vLLM writes chunks without spaces.
    separators = (", ", ": ") if body.get("spaced") else (",", ":")
    try:
        for nth, call in enumerate(calls):
            async for output in call:
                for one in output.outputs:
                    choice = {
                        "index": body.get("events_of", 0) + nth * count + one.index,
                        "text": one.text,
                        "finish_reason": one.finish_reason,
                    }
                    chunk = {"id": "cmpl", "choices": [choice]}
                    yield f"data: {json.dumps(chunk, separators=separators)}\n\n"
    except ValueError as error:
        yield f"data: {json.dumps(_error(error))}\n\n"
    finally:
        for call in calls:
            await call.aclose()
    yield "data: [DONE]\n\n"


def _error(error: Exception) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": "BadRequestError", "code": 400}}
