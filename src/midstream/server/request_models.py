"""The fields that this vLLM defines for the bodies of its endpoints."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel


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
