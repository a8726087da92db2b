"""Read and change what a model computes, mid-forward, inside vLLM at full speed. Names that need
vLLM or torch are imported on first use: plans need neither.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import midstream.plugin  # noqa: F401 (lists what `activate` installs)
from midstream import entries, errors
from midstream.entries import MOVED, PUBLIC
from midstream.plan import (
    Ablate,
    Affine,
    Attention,
    Between,
    Bias,
    Capture,
    Clamp,
    Feature,
    Features,
    Gate,
    Image,
    Lens,
    Local,
    Logits,
    LoReFT,
    Norms,
    Probe,
    Reconstruct,
    Replace,
    Role,
    Route,
    Scale,
    Span,
    Steer,
    Text,
    TokenIds,
    Window,
)
from midstream.version import __version__ as __version__

if TYPE_CHECKING:
    from midstream.api.sampling_params import SamplingParams
    from midstream.client import extra_body
    from midstream.lab.api.async_llm import AsyncLLM
    from midstream.lab.api.llm import LLM
    from midstream.lab.client import AsyncClient, Client
    from midstream.lab.fit import Directions
    from midstream.lab.sweep import KL, LogitDiff, LogProb, Recovered
    from midstream.plan.control.control_laws import Threshold
    from midstream.plan.control.controller import Controller
    from midstream.results.stack import stack
    from midstream.runtime.install import activate
    from midstream.sae.sae import SAE
    from midstream.store import open_store

__all__ = [
    "KL",
    "LLM",
    "SAE",
    "Ablate",
    "Affine",
    "Between",
    "Bias",
    "AsyncClient",
    "AsyncLLM",
    "Attention",
    "Capture",
    "Clamp",
    "Client",
    "Controller",
    "Directions",
    "Feature",
    "Features",
    "Gate",
    "Image",
    "LoReFT",
    "Local",
    "Lens",
    "LogProb",
    "LogitDiff",
    "Logits",
    "Norms",
    "Probe",
    "Recovered",
    "Reconstruct",
    "Replace",
    "Role",
    "Route",
    "SamplingParams",
    "Scale",
    "Span",
    "Steer",
    "Text",
    "Threshold",
    "TokenIds",
    "Window",
    "activate",
    "extra_body",
    "open_store",
    "stack",
]


# Names of other tools.
_MEANT = {
    **dict.fromkeys(("SteeringVector", "SteerVectorRequest", "Intervention", "Edit"), "Steer"),
    **dict.fromkeys(("ControlVector", "ControlModel", "SteeringVectors"), "Directions"),
    **dict.fromkeys(("HookedTransformer", "LanguageModel", "TransformerBridge"), "LLM"),
    **dict.fromkeys(("AutoEncoder", "SparseAutoEncoder", "Dictionary"), "SAE"),
    "Hook": "Capture",
    "load_store": "open_store",
}
# Modules of public names that are not here: errors, and what requests and results are made of.
_MODULES = ("errors", "layers", "lenses", "plan", "results", "sites", "store", "viz")

if not TYPE_CHECKING:  # for type checkers a name that is not above is an error

    def __getattr__(name: str) -> Any:
        if name in MOVED:
            problem = f"midstream.{name} is now {MOVED[name]}.{name}; this name ends with 0.2"
            warnings.warn(problem, DeprecationWarning, stacklevel=2)
        if name in PUBLIC or name in MOVED:
            try:
                return entries.public(name)
            except ModuleNotFoundError as error:
                raise errors.MissingExtraError.of(error, f"midstream.{name}") from error
        from midstream.validation import hint

        meant = _MEANT.get(name, "")
        shown = f" (did you mean `{meant}`?)" if meant else hint(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{shown}")


def __dir__() -> list[str]:
    loaded = globals().keys() & set(_MODULES)
    return sorted({*__all__, *loaded, "__version__"})
