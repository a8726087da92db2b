"""Finds a model's decoder layers, and which sites each of them has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from midstream.errors import UnsupportedError
from midstream.runtime.models.registry import LAYER_LISTS, LayerConvention, Refusal, lookup
from midstream.sites import NAMES, Tap


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One decoder layer of this rank.

    Attributes:
        index: its number in the whole model, over all pipeline stages.
        module: the layer.
        convention: what it takes and returns.
    """

    index: int
    module: nn.Module
    convention: LayerConvention


@dataclass(frozen=True, slots=True)
class Decoder:
    """The decoder layers that this rank runs.

    Attributes:
        num_layers: of the whole model.
        layers: this rank's.
        lacking: sites that a layer of this rank does not have, and why.
    """

    num_layers: int
    layers: tuple[DecoderLayer, ...]
    lacking: dict[Tap, str]


def find_decoder(model: nn.Module, tensor_parallel_size: int, float16: bool) -> Decoder:
    """The decoder layers of a loaded model.

    Args:
        model: the model, as the runner holds it.
        tensor_parallel_size: over how many ranks each layer is split.
        float16: whether it runs in float16.

    Raises:
        UnsupportedError: they are not found, or the layout of one of them is not understood.
    """
    layers: list[DecoderLayer] = []
    lacking: dict[Tap, str] = {}
    module_list = _module_list(model)
    for index, module in enumerate(module_list):
        if type(module).__name__ in ("PPMissingLayer", "Identity"):
            continue
        convention = lookup(type(module), module)
        name = f"layer {index} of {type(model).__name__}, a {type(module).__qualname__},"
        if isinstance(convention, Refusal):
            raise UnsupportedError(f"{name} cannot be tapped: {convention.reason}")
        if convention.tp_partial and tensor_parallel_size > 1:
            raise UnsupportedError(
                f"{name} returns a partial sum under tensor parallelism, which midstream cannot "
                "read or edit yet; use tensor_parallel_size=1"
            )
        if convention.float16_scaled and float16:
            raise UnsupportedError(
                f"{name} carries a scaled-down stream in float16, which is not what would be "
                "read or edited; use dtype=bfloat16"
            )
        for site in NAMES:
            reason = convention.lack(site, tensor_parallel=tensor_parallel_size > 1)
            if reason is not None:
                lacking[site, index] = reason
        layers.append(DecoderLayer(index, module, convention))
    return Decoder(len(module_list), tuple(layers), lacking)


def _module_list(model: nn.Module) -> nn.ModuleList:
    language_model = getattr(model, "get_language_model", None)
    root = language_model() if callable(language_model) else model
    for path in LAYER_LISTS:
        found: object = root
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, nn.ModuleList) and len(found):
            return found
    raise UnsupportedError(
        f"{type(model).__name__}: its decoder layers were not found; looked for "
        f"{', '.join(LAYER_LISTS)}"
    )
