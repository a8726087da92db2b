"""Bodies that are JSON: their checks, and the fields that this vLLM defines for its endpoints."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from midstream.errors import HttpError, SpecError
from midstream.validation import MAX_VALUES, has_more_values, hint, listed

# Bodies that are longer, or have more values, are parsed in a thread.
LONG = 1 << 18
_MANY_VALUES = 1 << 10
# Text of compressed arrays, of letters written as escapes, and of UTF-16: such a body may become
# long, however short it is.
_GROWING = (b"zstd", b"\\u00", b"\0")


def is_long(body: bytes) -> bool:
    """Return whether parsing a body may take more than some 20 ms, so that a thread has to."""
    for text in _GROWING:
        if text in body:
            return True
    return len(body) > LONG or len(body) > _MANY_VALUES and body.count(b",") > _MANY_VALUES


def check_values(body: bytes, param: str | None = None) -> None:
    if has_more_values(body):
        raise HttpError(
            413,
            f"the body has more than {MAX_VALUES} values; write vectors as "
            '{"f32": "<base64 of little-endian float32>"}',
            param,
        )


def check_fields(fields: Mapping[str, Any], known: Sequence[str], required: Sequence[str]) -> None:
    for name in fields:
        if name not in known:
            raise SpecError(name, f"unknown field{hint(name, known)}; known: {listed(known)}")
    for name in required:
        if name not in fields:
            raise SpecError(name, "missing")


def completions_of(body: Mapping[str, Any]) -> int:
    """Return how many completions a body of vLLM's endpoints asks for, before it is checked."""
    several, count = prompts_of(body), body.get("n")
    return several * count if isinstance(count, int) and count > 0 else several


def prompts_of(body: Mapping[str, Any]) -> int:
    """Return the number of prompts in a body: a list of token ids is one."""
    prompt: Any = body.get("prompt")
    is_several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return len(prompt) if is_several else 1


def body_fields(app: Any) -> dict[str, frozenset[str]]:
    """Return the fields of the models that vLLM's endpoints read their bodies as, by path."""
    by_path = {}
    for route in getattr(app, "routes", ()):
        endpoint = getattr(route, "endpoint", None)
        if (getattr(endpoint, "__module__", None) or "").startswith("vllm."):
            try:
                hints = typing.get_type_hints(endpoint).values()
            except (NameError, TypeError):
                continue
            models = (model for hint in hints for model in _models(hint))
            if names := frozenset(name for model in models for name in _names(model)):
                by_path[route.path] = names
    return by_path


def _models(hint: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a type, such as those of a union."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for part in typing.get_args(hint):
        yield from _models(part)


def _names(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield name
        if field.alias:
            yield field.alias
