"""Which sites, and which layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from midstream.errors import SpecError
from midstream.sites import NAMES, canonical
from midstream.validation import MAX_ITEMS, at, hint, is_int, kind, listed, read_int, show


def read_site(value: object) -> str:
    """The canonical name of a site given by name or alias."""
    if not isinstance(value, str):
        raise SpecError("", f"expected the name of a site, `str`, got {kind(value)}")
    name = canonical(value)
    if name is None:
        raise SpecError(
            "", f"unknown site {show(value)}{hint(value, NAMES)}; known: {listed(NAMES)}"
        )
    return name


@dataclass(frozen=True, slots=True, init=False)
class Sites:
    """Some sites, in the order given.

    Attributes:
        names: canonical names, at least one, each once.
    """

    names: tuple[str, ...]

    def __init__(self, sites: object) -> None:
        """Reads a name, or a list or tuple of names; aliases are accepted.

        Raises:
            SpecError: an unknown name, the same site twice, or none.
        """
        object.__setattr__(self, "names", _read_sites(sites))

    @staticmethod
    def parse(value: object) -> Sites:
        """`value` as Sites, from anything the constructor takes."""
        return value if isinstance(value, Sites) else Sites(value)

    def emit(self) -> list[str]:
        """The JSON form, which `parse` reads back."""
        return list(self.names)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True, init=False)
class Layers:
    """Some layers, in the order given, or all that are tapped.

    Attributes:
        indices: "all", or at least one index, each once; −1 is the last layer.
    """

    indices: tuple[int, ...] | Literal["all"]

    def __init__(self, layers: object = "all") -> None:
        """Reads "all", an int, or a list, tuple or range of ints.

        Raises:
            SpecError: something else, the same index twice, or none.
        """
        object.__setattr__(self, "indices", _read_layers(layers))

    @staticmethod
    def parse(value: object) -> Layers:
        """`value` as Layers, from anything the constructor takes."""
        return value if isinstance(value, Layers) else Layers(value)

    def emit(self) -> list[int] | str:
        """The JSON form, which `parse` reads back."""
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
                raise SpecError("", f"{show(item)} names the site `{name}` a second time")
            names.append(name)
    return tuple(names)


def _read_layers(value: object) -> tuple[int, ...] | Literal["all"]:
    if isinstance(value, Layers):
        return value.indices
    if isinstance(value, str):
        if value != "all":
            raise SpecError("", f'expected "all" or indices of layers, got {show(value)}')
        return "all"
    if is_int(value):
        return (read_int(value),)
    if not isinstance(value, (list, tuple, range)):
        raise SpecError("", f'expected "all", `int` or a list of `int`, got {kind(value)}')
    if not value:
        raise SpecError("", 'expected at least one layer; use "all" for all')
    # Not by len(), which a range may be too long for.
    if value[MAX_ITEMS:]:
        raise SpecError("", f"at most {MAX_ITEMS} layers can be listed")
    found: dict[int, None] = {}
    for index, item in enumerate(value):
        with at(f"[{index}]"):
            if isinstance(item, str) and item == "all":
                if len(value) == 1:
                    return "all"
                raise SpecError("", '"all" stands alone')
            layer = read_int(item)
            if layer in found:
                raise SpecError("", f"layer {layer} is listed twice")
            found[layer] = None
    return tuple(found)
