"""`Sites` and `Layers`: selections of hook points."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from midstream.errors import SpecError
from midstream.plan.argument_names import read_each
from midstream.sites import ENDS, NAMES, is_elsewhere, parse
from midstream.validation import MAX_ITEMS, as_list, at, hint, is_int, kind, listed, read_int, show

LOGITS = (
    "logits are returned by Logits(top=…) or Logits(tokens=…), edited by Bias alone, and read by "
    "no probe or gate; final_norm is what the head reads"
)
# The sites whose vectors are of the model's width, whole on every rank.
WIDE = ("resid_pre", "attn_in", "attn_out", "resid_mid", "mlp_in", "mlp_out", "resid_post")
# Names of TransformerLens and nnterp for what `Attention` reads, and its argument `reduce`.
_WEIGHTS = {
    "attn.hook_pattern": "full",
    "attn.hook_attn_scores": "scores",
    "attention_probabilities": "full",
}
Name = tuple[str, int | None]  # (canonical site, layer if the name has one)


def read_site(value: object) -> str:
    """Return the canonical name of a site, given in any spelling of `sites.parse`."""
    site, layer = _read_name(value)
    if layer is not None:
        raise SpecError("", f"{show(str(value))} names layer {layer} too; write {show(site)}")
    return site


def _read_name(value: object) -> Name:
    if not isinstance(value, str):
        raise SpecError("", f"expected the name of a site, `str`, got {kind(value)}")
    site_name = parse(value)
    if site_name is not None:
        return site_name
    weights = next((word for name, word in _WEIGHTS.items() if name in value), None)
    if weights is not None:
        raise SpecError(
            "",
            f"{show(value)} has no site here; a capture of weights returns it: "
            f'Attention(layers, reduce="{weights}")',
        )
    if is_elsewhere(value):
        raise SpecError("", f"{show(value)} has no site here; unsupported. Sites: {listed(NAMES)}")
    raise SpecError("", f"unknown site {show(value)}{hint(value, NAMES)}; known: {listed(NAMES)}")


def read_taps(
    layers: object, sites: object, layers_field: str, sites_field: str
) -> tuple[Layers | None, Sites | None]:
    """Read layers and sites; None if not given. Names of sites may have the layers, as
    `blocks.10.hook_resid_post`: several are every combination. Sites without a layer alone have
    "all".
    """
    names: list[Name] = []
    if isinstance(sites, (str, list, tuple)):
        with at(sites_field):
            single = isinstance(sites, str)
            names = [_read_name(sites)] if single else [*read_each("", sites, _read_name)]
    ends = [site for site, _ in names if site in ENDS]
    own = dict.fromkeys(layer for _, layer in names if layer is not None)
    if own:
        names = [name for name in names if name[0] not in ENDS]
        only = list(dict.fromkeys(site for site, _ in names))
        if any(layer is None for _, layer in names):
            raise SpecError(sites_field, "either every name or none must have a layer")
        if len(set(names)) < len(names):
            raise SpecError(sites_field, "two names are of the same site and layer")
        if len(names) != len(own) * len(only):
            raise SpecError(
                sites_field,
                "the names are not every combination of their layers and sites; give one capture "
                "or edit for each",
            )
        with at(layers_field):
            if layers is not None and Layers.parse(layers).indices != tuple(own):
                shown = ", ".join(map(str, own))
                raise SpecError("", f"the names of the sites have layer {shown}; omit it here")
        return Layers(list(own)), Sites([*only, *ends])
    with at(layers_field):
        chosen_layers = None if layers is None else Layers.parse(layers)
    with at(sites_field):
        chosen = None if sites is None else Sites.parse(sites)
    if chosen is not None and not chosen.in_layers:
        if chosen_layers is not None and chosen_layers.indices != "all":
            shown = ", ".join(map(str, chosen_layers.emit()))
            listed_sites = listed(chosen.names)
            raise SpecError(
                layers_field,
                f"got {shown}, but {listed_sites} {'has' if len(chosen) == 1 else 'have'} no "
                f"layer: omit `{layers_field}`",
            )
        chosen_layers = Layers("all")
    return chosen_layers, chosen


@dataclass(frozen=True, slots=True, init=False)
class Sites:
    """A list of sites, in the given order.

    Attributes:
        names: canonical names, at least one, each once.
    """

    names: tuple[str, ...]

    def __init__(self, sites: object) -> None:
        """Read a name, or a list or tuple of names; aliases are accepted.

        Raises:
            SpecError: an unknown name, a duplicate site, or an empty list.
        """
        object.__setattr__(self, "names", _read_sites(sites))

    @staticmethod
    def parse(value: object) -> Sites:
        """Return a Sites, from a Sites or any form of the constructor's argument."""
        return value if isinstance(value, Sites) else Sites(value)

    def emit(self) -> list[str]:
        """Return the JSON form, which `parse` reads."""
        return list(self.names)

    @property
    def in_layers(self) -> bool:
        """Whether any of the sites has layers; `embed` and `final_norm` have none."""
        return any(name not in ENDS for name in self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True, init=False)
class Layers:
    """A list of layers, each once, in the given order; or "all" tapped ones. −1 is the last."""

    indices: tuple[int, ...] | Literal["all"]

    def __init__(self, layers: object = "all") -> None:
        """Read "all", an int, or a list, tuple, range, or 1-D array or tensor of ints."""
        object.__setattr__(self, "indices", _read_layers(layers))

    @staticmethod
    def parse(value: object) -> Layers:
        """Return a Layers, from a Layers or any form of the constructor's argument."""
        return value if isinstance(value, Layers) else Layers(value)

    def emit(self) -> list[int] | str:
        """Return the JSON form, which `parse` reads."""
        return "all" if self.indices == "all" else list(self.indices)


def _read_sites(value: object) -> tuple[str, ...]:
    if isinstance(value, Sites):
        return value.names
    if isinstance(value, str):
        return (read_site(value),)
    if not isinstance(value, (list, tuple)):
        raise SpecError("", f"expected a site's name or a list of names, got {kind(value)}")
    if not value:
        raise SpecError("", f"expected at least one site; known: {listed(NAMES)}")
    names: list[str] = []
    for index, item in enumerate(value):
        with at(f"[{index}]"):
            name = read_site(item)
            if name in names:
                raise SpecError("", f"duplicate site {show(item)}: `{name}` is already listed")
            names.append(name)
    return tuple(names)


def _read_layers(value: object) -> tuple[int, ...] | Literal["all"]:
    if isinstance(value, Layers):
        return value.indices
    value = as_list(value)
    if isinstance(value, str):
        if value != "all":
            raise SpecError("", f'expected "all" or layer indices, got {show(value)}')
        return "all"
    if is_int(value):
        return (read_int(value),)
    if not isinstance(value, (list, tuple, range)):
        raise SpecError("", f'expected "all", `int` or a list of `int`, got {kind(value)}')
    if not value:
        raise SpecError("", 'expected at least one layer; use "all" for all layers')
    # len() overflows for long ranges.
    if value[MAX_ITEMS:]:
        raise SpecError("", f"expected at most {MAX_ITEMS} layers")
    layers: dict[int, None] = {}
    for index, item in enumerate(value):
        with at(f"[{index}]"):
            if isinstance(item, str) and item == "all":
                if len(value) == 1:
                    return "all"
                raise SpecError("", '"all" cannot be combined with layer indices')
            layer = read_int(item)
            if layer in layers:
                raise SpecError("", f"layer {layer} is listed twice")
            layers[layer] = None
    return tuple(layers)
