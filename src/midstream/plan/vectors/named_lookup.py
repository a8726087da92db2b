"""Lookup of registered names, and of the taps and vectors of those that have vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, overload

from midstream.errors import SpecError
from midstream.plan.selection import Layers, Sites
from midstream.plan.vectors.vector import Vector
from midstream.sites import BY_NAME, Tap
from midstream.validation import listed

Registered = Mapping[Tap | None, Vector]  # one vector per tap, or a single one under None


@dataclass(frozen=True, slots=True)
class NamedEdits:
    """Whole edits registered under a name, by value, for a `Steer` with the name as its vector."""

    edits: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class SaeName:
    """The name of a registered sparse autoencoder (SAE); vectors may have the same name."""

    name: str


class SaeCode(NamedTuple):
    """An SAE that reconstructs on the workers: its `place` in their memory, the sha256 of its
    numbers, and whether it reads one site and writes another.
    """

    name: str
    place: int
    digest: str
    features: int
    transcodes: bool


class FeatureSource(Protocol):
    """A registered SAE, as edits of its features need it."""

    @property
    def tap(self) -> Tap | None:
        """The site and layer where it was trained; None: it does not say."""

    def weights_of(self, ids: Sequence[int], mode: str) -> Mapping[str, Any]:
        """Return what a `Feature` of a mode takes by value: encoder, decoder, bias, threshold."""

    def reconstructs(self) -> SaeCode:
        """Return how the workers reconstruct vectors with it."""


class Lookup(Protocol):
    """Returns what is registered under a name."""

    @overload
    def __call__(self, name: str, /) -> Registered | NamedEdits: ...
    @overload
    def __call__(self, name: SaeName, /) -> FeatureSource: ...


_SHOWN = 8


def vectors_of(name: str, lookup: Lookup) -> Registered:
    registered = lookup(name)
    if isinstance(registered, NamedEdits):
        raise SpecError(
            "",
            f"`{name}` is registered with whole edits, not with vectors; use it as "
            f'Steer("{name}"), without a gate',
        )
    return registered


def from_start(layers: Layers, num_layers: int | None) -> Layers:
    """Return the layers counted from 0; unchanged if `num_layers` is None."""
    if num_layers is None or layers.indices == "all":
        return layers
    return Layers([index_from_start(index, num_layers) for index in layers.indices])


def index_from_start(index: int, num_layers: int | None) -> int:
    """Convert a negative layer index to one from 0; out-of-range indices are unchanged."""
    if num_layers is None or not -num_layers <= index < 0:
        return index
    return index + num_layers


def is_plain(registered: Registered) -> bool:
    """Return whether the name has a single vector without a tap."""
    return None in registered


def taps_of(registered: Registered) -> tuple[Tap, ...]:
    """Return the taps of a name, in the order of a forward pass."""
    taps = [tap for tap in registered if tap is not None]
    return tuple(sorted(taps, key=lambda tap: (tap[1], BY_NAME[tap[0]].order)))


def pick(name: str, registered: Registered, tap: Tap) -> Vector:
    """Return the name's vector at a tap, or its single vector without a tap."""
    vector = registered.get(None) or registered.get(tap)
    if vector is None:
        raise SpecError("layer", _has_none(name, registered, f"{tap[0]} at layer {tap[1]}"))
    return vector


def find_taps(
    registered: Mapping[str, Registered], layers: Layers, sites: Sites, left: Sequence[str]
) -> tuple[Tap, ...] | None:
    """Return the taps at which an edit with registered names applies; an omitted field, or "all"
    layers, selects all of the names'. None: no name has taps, the edit's own layers and sites
    apply.
    """
    tapped = {name: vectors for name, vectors in registered.items() if not is_plain(vectors)}
    if not tapped:
        if "layer" in left:
            raise SpecError(
                "layer",
                f"missing: {listed(registered)} is registered without layers; give the layer here",
            )
        return None
    chosen = {
        name: _of_name(name, vectors, layers, sites, left) for name, vectors in tapped.items()
    }
    first, *others = chosen
    for name in others:
        for lacking, other in ((first, name), (name, first)):
            missing = [tap for tap in chosen[other] if tap not in chosen[lacking]]
            if missing:
                site, layer = missing[0]
                what = f"{site} at layer {layer}, where `{other}` has one"
                raise SpecError("layer", _has_none(lacking, registered[lacking], what))
    return chosen[first]


def _of_name(
    name: str, registered: Registered, layers: Layers, sites: Sites, left: Sequence[str]
) -> tuple[Tap, ...]:
    taps = taps_of(registered)
    if "site" not in left:
        for site in sites:
            if not any(tap[0] == site for tap in taps):
                raise SpecError("site", _has_none(name, registered, f"the site {site}"))
        taps = tuple(tap for tap in taps if tap[0] in sites.names)
    if layers.indices == "all":
        return taps
    for layer in layers.indices:
        here = [tap[0] for tap in taps if tap[1] == layer]
        wanted = [] if "site" in left else [site for site in sites if site not in here]
        if wanted or not here:
            what = f"{wanted[0]} at layer {layer}" if wanted else f"layer {layer}"
            raise SpecError("layer", _has_none(name, registered, what))
    return tuple(tap for tap in taps if tap[1] in layers.indices)


def _has_none(name: str, registered: Registered, what: str) -> str:
    taps = taps_of(registered)
    more = f" and {len(taps) - _SHOWN} more" if len(taps) > _SHOWN else ""
    has = ", ".join(f"{site} at layer {layer}" for site, layer in taps[:_SHOWN])
    return f"`{name}` has no vector for {what}; it has {has}{more}"
