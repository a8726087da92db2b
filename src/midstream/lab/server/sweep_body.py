"""The body of a request for a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.lab.sweep import SweepRequest
from midstream.lab.sweep.request import OPTIONS
from midstream.lab.sweep.source import PromptSource
from midstream.plan.argument_names import one_spelling
from midstream.server.body_values import check_fields
from midstream.validation import at, kind

# Arguments of the chat template. A template itself is not a client's to give.
_TEMPLATE = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")

_REQUIRED = ("prompt", "source", "metric")
_KNOWN = (*_REQUIRED, *OPTIONS, "model", "stream", *_TEMPLATE)


@dataclass(frozen=True)
class SweepBody:
    """One request for a sweep."""

    prompt: Any
    request: SweepRequest
    model: str | None  # or an adapter; None: the model
    stream: bool  # whether cells are sent one by one
    template: Mapping[str, Any]


def read_sweep(value: object) -> SweepBody:
    """Parse a body: `prompt`, `model`, `stream`, template arguments, and a `SweepRequest`."""
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected an object of a sweep's arguments, got {kind(value)}")
    fields = one_spelling(value, _KNOWN)
    check_fields(fields, _KNOWN, _REQUIRED)
    model, stream = fields.pop("model", None), fields.pop("stream", True)
    if model is not None and not isinstance(model, str):
        raise SpecError("model", f"expected the name of a model, got {kind(model)}")
    _check_flag("stream", stream)
    prompt = fields.pop("prompt")
    template = {name: fields.pop(name) for name in _TEMPLATE if name in fields}
    for name, argument in template.items():
        if name != "chat_template_kwargs":
            _check_flag(name, argument)
        elif not isinstance(argument, Mapping):
            raise SpecError(name, f"expected an object, got {kind(argument)}")
        elif "chat_template" in argument:
            raise SpecError(f"{name}.chat_template", "a request cannot have a template of its own")
    request = SweepRequest.parse(fields)
    with at("prompt"):
        _check_texts(prompt)
    if isinstance(request.source, PromptSource):
        with at("source"):
            _check_texts(request.source.prompt)
    return SweepBody(prompt, request, model, stream, template)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise SpecError(name, f"expected true or false, got {kind(value)}")


def _check_texts(prompt: object) -> None:
    """Check that messages are text: an image may be a URL, which the server would fetch."""
    if not isinstance(prompt, (list, tuple)):
        return
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            continue
        content = message.get("content")
        parts = content if isinstance(content, (list, tuple)) else [{"type": "text"}]
        is_text = all(isinstance(part, Mapping) and part.get("type") == "text" for part in parts)
        if not is_text or not isinstance(content, (str, list, tuple, type(None))):
            raise SpecError(f"[{index}].content", "expected text; a sweep's messages have no media")
