"""Read and change what a model computes, mid-forward, inside vLLM at full speed.

What needs vLLM or torch is imported when it is first used: the values that say what a request
asks for (`Capture`, `Steer`, …) can be made anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.config import Config
from midstream.errors import (
    CodecError,
    ConfigError,
    EngineError,
    FetchError,
    MidstreamError,
    NoRoomError,
    NothingSelectedError,
    RankError,
    ReceiptError,
    ReceiptWarning,
    SeamError,
    SpecError,
    StoreError,
    TapError,
    UnsupportedError,
)
from midstream.receipt import Receipt
from midstream.scores import Probes
from midstream.spec import (
    Ablate,
    Affine,
    Capture,
    Clamp,
    Feature,
    Gate,
    LoReFT,
    Named,
    Plan,
    Positions,
    Probe,
    Reading,
    Replace,
    Role,
    Scale,
    Sites,
    Span,
    Steer,
    Text,
    TokenIds,
    Vector,
    Window,
)
from midstream.version import __version__

if TYPE_CHECKING:
    from midstream.activations import Activations
    from midstream.async_llm import AsyncLLM
    from midstream.client import AsyncClient, Client, extra_body
    from midstream.features import SAE
    from midstream.llm import LLM
    from midstream.runtime.patches import activate
    from midstream.sampling import SamplingParams
    from midstream.store import open_store

__all__ = [
    "LLM",
    "SAE",
    "Ablate",
    "Activations",
    "Affine",
    "AsyncClient",
    "AsyncLLM",
    "Capture",
    "Clamp",
    "Client",
    "CodecError",
    "Config",
    "ConfigError",
    "EngineError",
    "Feature",
    "FetchError",
    "Gate",
    "LoReFT",
    "MidstreamError",
    "Named",
    "NoRoomError",
    "NothingSelectedError",
    "Plan",
    "Positions",
    "Probe",
    "Probes",
    "RankError",
    "Reading",
    "Receipt",
    "ReceiptError",
    "ReceiptWarning",
    "Replace",
    "Role",
    "SamplingParams",
    "Scale",
    "SeamError",
    "Sites",
    "Span",
    "SpecError",
    "Steer",
    "StoreError",
    "TapError",
    "Text",
    "TokenIds",
    "UnsupportedError",
    "Vector",
    "Window",
    "activate",
    "extra_body",
    "open_store",
    "__version__",
]

_LAZY = {
    "LLM": "midstream.llm",
    "SAE": "midstream.features",
    "Activations": "midstream.activations",
    "AsyncClient": "midstream.client",
    "AsyncLLM": "midstream.async_llm",
    "Client": "midstream.client",
    "SamplingParams": "midstream.sampling",
    "activate": "midstream.runtime.patches",
    "extra_body": "midstream.client",
    "open_store": "midstream.store",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
