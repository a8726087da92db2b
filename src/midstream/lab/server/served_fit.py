"""One fit of a server: its prompts are run below ordinary requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from midstream.api.traffic import RUN_ID
from midstream.errors import SpecError
from midstream.lab.fit import Directions
from midstream.lab.fit.prompts import is_chat
from midstream.lab.server.fit_body import FitBody
from midstream.plan.readouts.capture import Capture
from midstream.runtime.frontend.request.heavy_work import in_thread
from midstream.runtime.frontend.request.prompt.tokenized import tokenize
from midstream.server import audit_log
from midstream.server.server import Server
from midstream.validation import at, is_int

_ONE_ROW = ("last_prompt", "last_row")


async def run_fit(server: Server, body: FitBody, lora_request: Any, client: str) -> Directions:
    began = time.monotonic()
    prompts = await in_thread(_tokenized, server, body)
    _check_bytes(
        server, body.capture, [prompt for class_prompts in prompts for prompt in class_prompts]
    )
    engine = _YieldingEngine(server, lora_request)
    directions = await Directions.fit_async(engine, *prompts, **body.options)
    audit_log.log_event(
        "fit.ended",
        client=client,
        prompts=sum(map(len, prompts)),
        layers=len(directions),
        seconds=round(time.monotonic() - began, 3),
    )
    return directions


class _YieldingEngine:
    """A server's engine, whose requests wait while ordinary ones take it."""

    def __init__(self, server: Server, lora_request: Any) -> None:
        self._server = server
        self._lora_request = lora_request
        self._by_priority = server.llm.vllm_config.scheduler_config.policy == "priority"
        self.model_config = server.llm.vllm_config.model_config
        self.get_tokenizer = server.llm.get_tokenizer

    async def generate(
        self, prompt: Any, params: Any, *, capture: Any, edits: Any, probes: Any
    ) -> AsyncGenerator[Any, None]:
        """Yield the outputs of `AsyncLLM.generate`, once it is this request's turn."""
        llm = self._server.llm
        async with self._server.sweeps.turn(llm.traffic, self._by_priority) as more:
            outputs = llm.generate(
                prompt,
                params,
                f"{RUN_ID}{uuid.uuid4().hex}",
                capture=capture,
                edits=edits,
                probes=probes,
                lora_request=self._lora_request,
                **more,
            )
            async for output in outputs:
                yield output


def _tokenized(server: Server, body: FitBody) -> tuple[list[list[int]], list[list[int]]]:
    token_ids: list[list[list[int]]] = []
    for path, prompts in (("positive", body.positive), ("negative", body.negative)):
        token_ids.append([])
        for index, prompt in enumerate(prompts):
            with at(f"{path}[{index}]"):
                ids = tokenize(server.llm, prompt, _template(server, prompt)).token_ids
                token_ids[-1].append(list(ids or ()))
    return token_ids[0], token_ids[1]


def _template(server: Server, prompt: Any) -> Mapping[str, Any]:
    """Return arguments of the chat template: a last answer goes on, else the assistant begins."""
    if not is_chat(prompt):
        return {}
    for index, message in enumerate(prompt):
        if not isinstance(message.get("content"), str):
            raise SpecError(f"[{index}].content", "expected text; the chats of a fit have no media")
    goes_on = prompt[-1].get("role") == "assistant"
    own = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
    return {**server.template, **own}


def _check_bytes(server: Server, capture: Capture, prompts: Sequence[Sequence[int]]) -> None:
    """Check that the rows of a fit do not take more memory than a client may."""
    shape = server.llm.info.shape
    count_of = _counter(capture)
    layers = capture.layers.indices
    num_layers = shape.num_layers if layers == "all" else len(layers)
    size = sum(count_of(len(prompt)) for prompt in prompts) * num_layers * shape.hidden_size * 4
    limit = server.settings.client_bytes
    if size > limit:
        raise SpecError(
            "positions",
            f"the rows of this fit may take {size} bytes, more than the {limit} of the setting "
            'http.client_bytes; give fewer prompts or layers, "last_prompt", or reduce="mean"',
        )


def _counter(capture: Capture) -> Callable[[int], int]:
    """Return a function from a prompt's length to the most rows that it gives at a layer."""
    items = capture.positions.emit()
    if capture.reduce:
        return lambda length: 1
    if all(is_int(position) or position in _ONE_ROW for position in items):
        return lambda length: min(len(items), length)
    return lambda length: length
