"""Read and change what a model computes, mid-forward, inside vLLM at full speed. Names that need
vLLM or torch are imported on first use: plans need neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import midstream.plugin  # noqa: F401 (lists what `activate` installs)
from midstream.entries import PUBLIC, public
from midstream.errors import (
    BusyError,
    CodecError,
    ConfigError,
    ControllerError,
    EngineError,
    ExistsError,
    FetchError,
    MidstreamError,
    MissingExtraError,
    NoRoomError,
    NotAskedError,
    NothingSelectedError,
    RankError,
    ReceiptError,
    ReceiptWarning,
    SeamError,
    ServerError,
    SpecError,
    StoreError,
    TapError,
    UnsupportedError,
)
from midstream.plan import (
    MLP,
    Ablate,
    Affine,
    Attention,
    Between,
    Bias,
    Capture,
    CapturedRows,
    Clamp,
    Entropy,
    Feature,
    Features,
    Flag,
    Gate,
    Image,
    Lens,
    Local,
    Logits,
    LoReFT,
    Mass,
    Media,
    Named,
    Norms,
    Plan,
    Positions,
    Probe,
    Reading,
    Reconstruct,
    Replace,
    Role,
    Route,
    Scale,
    Sites,
    Span,
    Steer,
    Stop,
    Switch,
    Text,
    TokenIds,
    TopKeys,
    Vector,
    Window,
)
from midstream.results.local_info import LocalInfo
from midstream.results.probe_scores import Probes
from midstream.results.receipt import Receipt
from midstream.version import __version__

if TYPE_CHECKING:
    from midstream.api.sampling_params import SamplingParams
    from midstream.client import extra_body
    from midstream.config.config import Config
    from midstream.lab.api.async_llm import AsyncLLM
    from midstream.lab.api.llm import LLM
    from midstream.lab.client import AsyncClient, Client
    from midstream.lab.fit import Direction, Directions
    from midstream.lab.sweep import KL, LogitDiff, LogProb, Recovered, Sweep
    from midstream.layers import register_layer
    from midstream.lenses import JacobianLens, TunedLens
    from midstream.plan.control.control_laws import Threshold
    from midstream.plan.control.controller import Controller
    from midstream.results.activations import Activations
    from midstream.results.stack import stack
    from midstream.runtime.install import activate
    from midstream.sae.sae import SAE
    from midstream.store import open_store

__all__ = [
    "KL",
    "LLM",
    "SAE",
    "Ablate",
    "Activations",
    "Affine",
    "Between",
    "Bias",
    "AsyncClient",
    "AsyncLLM",
    "Attention",
    "Capture",
    "CapturedRows",
    "Clamp",
    "Client",
    "BusyError",
    "CodecError",
    "Config",
    "ConfigError",
    "Controller",
    "ControllerError",
    "Direction",
    "Directions",
    "EngineError",
    "Entropy",
    "Feature",
    "Features",
    "Flag",
    "ExistsError",
    "FetchError",
    "Gate",
    "Image",
    "LoReFT",
    "Local",
    "LocalInfo",
    "JacobianLens",
    "Lens",
    "LogProb",
    "LogitDiff",
    "Logits",
    "MLP",
    "Mass",
    "Media",
    "MidstreamError",
    "MissingExtraError",
    "Named",
    "NoRoomError",
    "Norms",
    "NotAskedError",
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
    "Recovered",
    "Reconstruct",
    "Replace",
    "Role",
    "Route",
    "SamplingParams",
    "Scale",
    "SeamError",
    "ServerError",
    "Sites",
    "Span",
    "SpecError",
    "Steer",
    "Stop",
    "Switch",
    "StoreError",
    "Sweep",
    "TapError",
    "Text",
    "Threshold",
    "TokenIds",
    "TopKeys",
    "TunedLens",
    "UnsupportedError",
    "Vector",
    "Window",
    "activate",
    "extra_body",
    "open_store",
    "register_layer",
    "stack",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        try:
            return public(name)
        except ModuleNotFoundError as error:
            raise MissingExtraError.of(error, f"midstream.{name}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
