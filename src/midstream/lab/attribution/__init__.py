"""Gradients and attribution patching by a transformers model: vLLM computes no gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.errors import MissingExtraError

if TYPE_CHECKING:
    from midstream.lab.attribution.attribution import Attribution
    from midstream.lab.attribution.check import AttributionCheck
    from midstream.lab.attribution.estimate import attribution_patching
    from midstream.lab.attribution.twin import Twin

__all__ = ["Attribution", "AttributionCheck", "Twin", "attribution_patching"]

_LAZY = {
    "Attribution": "midstream.lab.attribution.attribution",
    "AttributionCheck": "midstream.lab.attribution.check",
    "Twin": "midstream.lab.attribution.twin",
    "attribution_patching": "midstream.lab.attribution.estimate",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        try:
            return getattr(importlib.import_module(_LAZY[name]), name)
        except ModuleNotFoundError as error:
            raise MissingExtraError.of(error, "midstream.lab.attribution") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
