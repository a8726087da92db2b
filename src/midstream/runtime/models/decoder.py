"""Decoder layers of a loaded model, and the sites that each layer has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from torch import nn

from midstream.errors import UnsupportedError
from midstream.runtime.models.convention import LayerConvention, Refusal
from midstream.runtime.models.inner_sites import InnerPlace, find_inner_sites, find_streams
from midstream.runtime.models.registry import (
    layer_lists,
    load_registrations,
    lookup,
    replaced_forward,
)
from midstream.runtime.models.trunk_ends import NoEnd, find_end
from midstream.sites import ENDS, INNER, NAMES, OUTER, Tap


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A decoder layer of this rank."""

    index: int  # in the whole model, over all pipeline stages
    module: nn.Module
    convention: LayerConvention
    inner: Mapping[str, InnerPlace] = field(default_factory=dict)
    ends: Mapping[str, nn.Module | None] = field(default_factory=dict)  # None: the layer's entry


@dataclass(frozen=True, slots=True)
class Decoder:
    """This rank's decoder layers of `num_layers`, and why they lack taps."""

    num_layers: int
    layers: tuple[DecoderLayer, ...]
    lacking: dict[Tap, str]

    @property
    def inner(self) -> dict[Tap, InnerPlace]:
        """Places of the sites inside attention and the MLP, over all layers of this rank."""
        return {
            (site, layer.index): place
            for layer in self.layers
            for site, place in layer.inner.items()
        }


def find_decoder(
    model: nn.Module,
    tensor_parallel_size: int,
    float16: bool,
    sites: Collection[str] = OUTER,
    max_width: int | None = None,
    embeds_given: bool = False,
) -> Decoder:
    """Find a model's decoder layers; sites wider than `max_width` on a rank are lacking."""
    layers: list[DecoderLayer] = []
    lacking: dict[Tap, str] = {}
    module_list = find_layers(model)
    for index, module in enumerate(module_list):
        if type(module).__name__ in ("PPMissingLayer", "Identity"):
            continue
        convention = lookup(type(module), module)
        name = f"layer {index} of {type(model).__name__}, a {type(module).__qualname__},"
        if isinstance(convention, Refusal):
            raise UnsupportedError(f"{name} cannot be tapped: {convention.reason}")
        replaced = replaced_forward(module)
        if replaced is not None:
            raise UnsupportedError(f"{name} cannot be tapped: {replaced}")
        if convention.tp_partial and tensor_parallel_size > 1:
            raise UnsupportedError(
                f"{name} returns a partial sum under tensor parallelism, which midstream cannot "
                "read or edit yet; use tensor_parallel_size=1"
            )
        if convention.float16_scaled and float16:
            raise UnsupportedError(
                f"{name} has a scaled-down stream in float16, which is not what would be "
                "read or edited; use dtype=bfloat16"
            )
        for site in OUTER:
            reason = convention.lack(site, tensor_parallel=tensor_parallel_size > 1)
            if reason is not None:
                lacking[site, index] = reason
        inner: dict[str, InnerPlace] = {}
        places = find_inner_sites(module) if set(sites) & set(INNER) else {}
        for site, place in places.items():
            if not isinstance(place, InnerPlace):
                lacking[site, index] = place.reason
            elif max_width is not None and place.width > max_width:
                lacking[site, index] = (
                    f"its vectors have {place.width} numbers on each rank, and at most {max_width} "
                    "are supported on a GPU"
                )
            else:
                inner[site] = place
        streams = find_streams(module, convention)
        inner |= {site: place for site, place in streams.items() if site in sites}
        ends: dict[str, nn.Module | None] = {}
        for site in set(sites) & set(ENDS):
            if ENDS[site] % len(module_list) == index:
                end = find_end(site, model, module_list, convention, embeds_given)
                if isinstance(end, NoEnd):
                    lacking[site, index] = end.reason
                else:
                    ends[site] = end
        layers.append(DecoderLayer(index, module, convention, inner, ends))
    return Decoder(len(module_list), tuple(layers), lacking)


def all_lacks(
    model: nn.Module,
    tensor_parallel_size: int,
    float16: bool,
    max_width: int | None = None,
    embeds_given: bool = False,
) -> dict[Tap, str]:
    """Return taps that this rank lacks, and why, for messages: none if the model is unreadable."""
    args = tensor_parallel_size, float16, NAMES, max_width, embeds_given
    try:
        return find_decoder(model, *args).lacking
    except Exception:  # noqa: BLE001 - sites that nobody asked for must not keep a model from starting
        return {}


def find_root(model: nn.Module) -> nn.Module:
    """Return the language model of a model that has other parts, or the model itself."""
    language_model = getattr(model, "get_language_model", None)
    root: nn.Module = language_model() if callable(language_model) else model
    return root


def find_layers(model: nn.Module) -> nn.ModuleList:
    """Return the module list of a loaded model's decoder layers."""
    load_registrations()
    root = find_root(model)
    for path in layer_lists():
        module: object = root
        for name in path.split("."):
            module = getattr(module, name, None)
        if isinstance(module, nn.ModuleList) and len(module):
            return module
    raise UnsupportedError(
        f"{type(model).__name__}: its decoder layers were not found; looked for "
        f"{', '.join(layer_lists())}"
    )
