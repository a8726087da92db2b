"""What all edits and probes have in common: where they apply, and how they are written."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

from midstream.errors import SpecError
from midstream.ops.layout import Flags
from midstream.spec.binding import Lookup, find_taps, from_start, pick
from midstream.spec.fields import at, read_fields, read_float32, read_word
from midstream.spec.instructions import Instruction
from midstream.spec.matrix import emit_rows
from midstream.spec.named import Named
from midstream.spec.positions import Positions
from midstream.spec.selection import Layers, Sites
from midstream.spec.vector import Vector

SITE = "resid_post"

T = TypeVar("T", bound="Operation")


@dataclass(frozen=True, slots=True, init=False)
class Operation(ABC):
    """Something done at some taps to, or with, the vectors h of some tokens.

    Attributes:
        layers: which layers; −1 is the last one, "all" every layer at which the site is tapped.
        sites: which sites of each of them.
        positions: which tokens.
        left: which of "layer" and "site" were left out, which is allowed where the vector is a
            name: they are then as registered, and what `layers` and `sites` have is not meant.
    """

    layers: Layers
    sites: Sites
    positions: Positions
    left: tuple[str, ...]

    # The JSON form's `op`; empty where it has none.
    op: ClassVar[str] = ""

    @abstractmethod
    def __init__(self, *args: object, **fields: object) -> None:
        """Reads each field in any of its forms."""

    @abstractmethod
    def own(self) -> dict[str, Any]:
        """The constructor's arguments but for those that say where, by name."""

    @abstractmethod
    def instructions(self, width: int) -> tuple[Instruction, ...]:
        """The device's instructions, for one tap.

        Args:
            width: the model's hidden size.

        Raises:
            SpecError: a vector is not of that width, or is still a name.
        """

    @classmethod
    def parse(cls: type[T], value: object) -> T:
        """One of these, or a dict of the constructor's arguments and optionally its `op`.

        Raises:
            SpecError: a field is unknown, missing or malformed.
        """
        if isinstance(value, cls):
            return value
        required, optional = _parameters(cls)
        given = read_fields(value, required, (*optional, "op") if cls.op else optional)
        if "op" in given:
            with at("op"):
                read_word(given.pop("op"), (cls.op,))
        return cls(**given)

    def to_dict(self) -> dict[str, object]:
        """The JSON form, with every field that is meant, which `parse` reads back."""
        found: dict[str, object] = {"op": self.op} if self.op else {}
        found |= {name: _emit(value) for name, value in self.own().items()}
        # A single one stands alone, as it was probably written.
        places: dict[str, object] = {"layer": self.layers.emit(), "site": self.sites.emit()}
        for name, place in places.items():
            if name not in self.left:
                found[name] = place[0] if isinstance(place, list) and len(place) == 1 else place
        return found | self.positions.to_dict()

    def replace(self: T, **changes: object) -> T:
        """The same with some of the constructor's arguments changed."""
        given = {**self.own(), "layer": self.layers, "site": self.sites}
        given = {name: value for name, value in given.items() if name not in self.left}
        return type(self)(**{**given, "positions": self.positions, **changes})

    def names(self) -> tuple[str, ...]:
        """The names of registered vectors that it uses, each once."""
        return tuple(dict.fromkeys(named.name for named in self._named()))

    def bind(self: T, lookup: Lookup, num_layers: int | None = None) -> tuple[T, ...]:
        """The same by value: as it is, or one for each tap that its names have and that is meant.

        A layer or site that was left out is as registered: `Steer("happy")` is one Steer for each
        of the name's taps, `Steer("happy", layer=5)` one for each of those at layer 5. "all"
        layers are all that the name has.

        Args:
            lookup: gives the vectors of a name, by (site, layer from 0), or one under None; raises
                SpecError for an unknown name.
            num_layers: of the model; None: a layer counted from the end is not found in a name.

        Raises:
            SpecError: a name is unknown, or has no vector for a tap that is asked for.
        """
        if not self.names():
            return (self,)
        found = {name: lookup(name) for name in self.names()}
        layers = from_start(self.layers, num_layers)
        taps = find_taps(found, layers, self.sites, self.left)
        if taps is None:
            return (self._with({name: each[None] for name, each in found.items()}),)
        return tuple(
            self._with(
                {name: pick(name, each, tap) for name, each in found.items()},
                site=tap[0],
                layer=tap[1],
            )
            for tap in taps
        )

    def bound(self, vectors: dict[str, Vector]) -> dict[str, object]:
        """The constructor's arguments that change where each name stands for this vector."""
        return {
            name: tuple(_value(row, vectors) for row in value)
            if isinstance(value, tuple)
            else _value(value, vectors)
            for name, value in self.own().items()
        }

    def _with(self: T, vectors: dict[str, Vector], **place: object) -> T:
        return self.replace(**self.bound(vectors), **place)

    def _named(self) -> list[Named]:
        found: list[Named] = []
        for value in self.own().values():
            rows = value if isinstance(value, tuple) else (value,)
            found.extend(row for row in rows if isinstance(row, Named))
        return found

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _set_place(
        self,
        layer: object,
        site: object,
        positions: object,
        phase: object,
        exclude: object,
        last: bool = False,
    ) -> None:
        """Reads where; after the operation's own fields, as names may leave part of it open.

        Args:
            last: whether the position "last" is allowed.
        """
        named = bool(self._named())
        left = [name for name, value in (("layer", layer), ("site", site)) if value is None]
        if "layer" in left and not named:
            raise SpecError(
                "layer", "missing; it can be left out only where the vector is a registered name"
            )
        with at("layer"):
            self._set(layers=Layers("all") if layer is None else Layers.parse(layer))
        with at("site"):
            self._set(sites=Sites(SITE) if site is None else Sites.parse(site))
        found = Positions.within(positions, phase, exclude)
        if not last and "last" in found.include:
            raise SpecError(
                found.path(found.include.index("last")),
                '"last" is known only when generation has ended, so nothing can be edited there; '
                'use "last_prompt" or "generated"',
            )
        self._set(positions=found, left=tuple(left) if named else ())


def read_scalar(value: object) -> float:
    """A number that float32 can hold. There is no −0.0, which would be equal and emitted apart."""
    return read_float32(value) + 0.0


def by_value(vector: Vector | Named, width: int) -> Vector:
    """The vector, which must be there and of this width."""
    if isinstance(vector, Named):
        raise SpecError("", f"the vector `{vector.name}` is not registered")
    if vector.size != width:
        raise SpecError("", f"expected {width} numbers, the model's hidden size, got {vector.size}")
    return vector


def rows_by_value(
    field: str, rows: tuple[Vector, ...] | tuple[Vector | Named, ...], width: int
) -> tuple[Vector, ...]:
    """The rows, each of which must be there and of this width."""
    found = []
    for index, row in enumerate(rows):
        with at(f"{field}[{index}]"):
            found.append(by_value(row, width))
    return tuple(found)


def one_edit(steps: list[Instruction]) -> tuple[Instruction, ...]:
    """The instructions of one edit: all of them read the same h, and together count as one."""
    for index, step in enumerate(steps):
        if step.reads:
            steps[index] = step.with_flags(Flags.FRESH)
            break
    steps[-1] = steps[-1].with_flags(Flags.COUNTED)
    return tuple(steps)


@cache
def _parameters(cls: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The constructor's arguments: those without a default, and those with one."""
    parameters = list(inspect.signature(cls).parameters.values())
    required = tuple(each.name for each in parameters if each.default is each.empty)
    return required, tuple(each.name for each in parameters if each.name not in required)


def _emit(value: object) -> object:
    if isinstance(value, (Vector, Named)):
        return value.emit()
    return emit_rows(value) if isinstance(value, tuple) else value


def _value(value: object, vectors: dict[str, Vector]) -> object:
    return vectors[value.name] if isinstance(value, Named) else value
