"""A server with Studio in a thread: midstream's routes on a fake engine, scripted completions."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import uvicorn
from lab.server.routes.test_fit import script
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

from midstream.results.readouts.features import FeatureRows
from midstream.results.readouts.lens import LensRows
from support.serving import free_port
from support.serving_fake import Site, make

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
MODEL = "<b>fake</b>"
LAYERS = 4


class StudioServer:
    """One server."""

    def __init__(self, port: int | None = None, **settings: Any) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.bodies: list[dict[str, Any]] = []
        self.api_key: str | None = settings.pop("api_key", None)
        self._settings = {"studio": True, **settings}
        self.release = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    async def _serve(self) -> None:
        self.site: Site = await make(has_key=self.api_key is not None, **self._settings)
        self.site.engine.script = script
        config = uvicorn.Config(
            self._app,
            "127.0.0.1",
            self.port,
            log_level="critical",
            lifespan="off",
            interface="asgi3",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        serving = asyncio.ensure_future(self._server.serve())
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.01)
        self._ready.set()
        await serving
        self.site.server.close()

    def stop(self) -> None:
        """End it; connections are cut."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(20)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path.startswith("/v1") and self.api_key is not None:
            headers = dict(scope["headers"])
            if headers.get(b"authorization") != f"Bearer {self.api_key}".encode():
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        if path == "/v1/models":
            await JSONResponse({"data": [{"id": MODEL}]})(scope, receive, send)
        elif path in ("/v1/chat/completions", "/v1/completions"):
            body = await Request(scope, receive).json()
            self.bodies.append(body)
            is_chat = path.startswith("/v1/chat")
            if body.get("stream"):
                stream = self._stream(body, is_chat)
                answer: Any = StreamingResponse(stream, media_type="text/event-stream")
            else:
                answer = JSONResponse(_whole(body, is_chat))
            await answer(scope, receive, send)
        else:
            await self.site.app(scope, receive, send)

    async def _stream(self, body: dict[str, Any], is_chat: bool) -> Any:
        prompt = prompt_of(body)
        if "refuse" in prompt:
            yield _event({"error": {"message": HOSTILE, "code": 400}})
            return
        start = len(prompt)
        yield _event({"prompt_token_ids": list(map(ord, prompt)), "choices": []})
        words = _answer_to(body, prompt)
        size = 50 if len(words) > 1000 else 1
        for first in range(0, len(words), size):
            if "die" in prompt and first == 5:
                raise ConnectionError("the engine is gone")
            if "hold" in prompt and first == 5:
                while not self.release.is_set():
                    await asyncio.sleep(0.02)
            part = words[first : first + size]
            value = _choice(part, is_chat, first + size >= len(words))
            found = results_of(
                body.get("midstream"), range(start + first, start + first + len(part))
            )
            yield _event({"choices": [value], **({"midstream": found} if found else {})})
            await asyncio.sleep(0)
        receipt = _receipt(body.get("midstream"))
        yield _event({"choices": [], "midstream": receipt} if receipt else {"choices": []})
        yield b"data: [DONE]\n\n"


@contextmanager
def studio(**settings: Any) -> Iterator[StudioServer]:
    """A server until the block ends."""
    made = StudioServer(**settings)
    try:
        yield made
    finally:
        made.stop()


def prompt_of(body: dict[str, Any]) -> str:
    """The text that a body asks to be answered."""
    if "messages" in body:
        return "".join(str(one["content"]) for one in body["messages"] if one["role"] == "user")
    return str(body["prompt"])


def _answer_to(body: dict[str, Any], prompt: str) -> list[str]:
    if "hostile" in prompt:
        return [HOSTILE, " & ", "</span>", "\u202e", " ok"]
    if "long" in prompt:
        return [f"word{nth} " for nth in range(5000)]
    plan = body.get("midstream") or {}
    adjective = " gloomy" if plan.get("edits") else " fine"
    return ["The", " day", " is", adjective, ",", " and", " the", " sky", " is", " blue", "."]


def _choice(words: list[str], is_chat: bool, is_last: bool) -> dict[str, Any]:
    logprobs = [-0.1 * (nth % 7) for nth in range(len(words))]
    text, finish = "".join(words), "stop" if is_last else None
    if not is_chat:
        found = {"tokens": words, "token_logprobs": logprobs}
        return {"index": 0, "text": text, "finish_reason": finish, "logprobs": found}
    content = [
        {"token": word, "logprob": value, "bytes": list(word.encode())}
        for word, value in zip(words, logprobs, strict=True)
    ]
    return {"index": 0, "delta": {"content": text}, "finish_reason": finish,
            "logprobs": {"content": content}}  # fmt: skip


def results_of(plan: dict[str, Any] | None, places: range) -> dict[str, Any]:
    """What a field `midstream` gives for some positions."""
    found: dict[str, Any] = {}
    for probe in (plan or {}).get("probes", ()):
        layer = probe["layer"]
        found.setdefault("probes", {})[probe["name"]] = {
            "scores": [math.sin(place) + layer for place in places],
            "positions": list(places),
            "token_ids": [0 for _ in places],
        }
    for capture in (plan or {}).get("capture", ()):
        stream = capture.get("stream")
        if "sae" in capture:
            rows = _features(capture, places).to_json()
            found["feature_rows" if stream else "features"] = _named(stream, capture["sae"], rows)
        elif "kind" in capture:
            rows = _lens(capture, places).to_json()
            found["lens_rows" if stream else "lens"] = _named(stream, capture["kind"], rows)
    return found


def _named(stream: bool | None, name: str, rows: Any) -> Any:
    return [{name: rows}] if stream else {name: rows}


def _lens(capture: dict[str, Any], places: range) -> LensRows:
    layers = range(LAYERS) if capture["layers"] == "all" else capture["layers"]
    shape = (len(places), len(layers), capture["top"])
    tokens = len(capture.get("tokens", ()))
    values = -torch.arange(capture["top"], dtype=torch.float32).expand(shape).contiguous()
    ids = torch.arange(ord("a"), ord("a") + capture["top"]).expand(shape).contiguous()
    chosen = torch.full((*shape[:2], tokens), -0.5)
    return LensRows(
        values, ids, tuple(range(tokens)), chosen, torch.ones_like(chosen, dtype=torch.int64),
        torch.full(shape[:2], 0.5), torch.tensor(list(places)), tuple(layers),
    )  # fmt: skip


def _features(capture: dict[str, Any], places: range) -> FeatureRows:
    count = len(places)
    values = torch.tensor([[float(place % 4)] for place in places])
    return FeatureRows(
        ids=torch.zeros((count, 0), dtype=torch.int64), values=torch.zeros((count, 0)),
        features=tuple(capture["features"]), feature_values=values,
        l0=torch.ones(count, dtype=torch.int64), positions=torch.tensor(list(places)),
        site="resid_post", layer=1,
    )  # fmt: skip


def _receipt(plan: dict[str, Any] | None) -> dict[str, Any]:
    if not plan:
        return {}
    edits = {"expected": 11, "applied": 11, "cached": 0} if plan.get("edits") else None
    return {"receipt": {"status": "ok", "edited": edits}}


def _whole(body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
    prompt = prompt_of(body)
    ids = list(map(ord, prompt))
    choice = {"index": 0, "finish_reason": "length", "prompt_token_ids": ids, "text": "!"}
    if is_chat:
        choice = {"index": 0, "finish_reason": "length", "message": {"content": "!"}}
    found = {
        **results_of(body.get("midstream"), range(len(ids))),
        **_receipt(body.get("midstream")),
    }
    return {"prompt_token_ids": ids, "choices": [choice], "midstream": found}


def _event(value: Any) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()
