"""`Operation`: base class of edits and probes, with their location and JSON form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from midstream.errors import SpecError
from midstream.ops.layout import Flags
from midstream.plan.argument_names import (
    FrozenFields,
    other_argument,
    parameters_of,
    read_each,
    read_named,
    shown_names,
)
from midstream.plan.heads import head_size, in_heads, read_indices
from midstream.plan.instructions import Instruction
from midstream.plan.positions.positions import Positions
from midstream.plan.selection import LOGITS, Layers, Sites, read_taps
from midstream.plan.shape import VectorSize
from midstream.plan.short_repr import short_repr
from midstream.plan.vectors.matrix import emit_rows
from midstream.plan.vectors.named_lookup import Lookup, find_taps, from_start, pick, vectors_of
from midstream.plan.vectors.named_vector import Named
from midstream.plan.vectors.vector import Vector
from midstream.sites import ENDS
from midstream.validation import at, is_int, kind, read_float32, read_word

SITE = "resid_post"

T = TypeVar("T", bound="Operation")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Operation(FrozenFields, ABC):
    """An edit or a probe: an operation on the vectors h of selected tokens at selected taps.

    Attributes:
        layers: the layers; −1 is the last one, "all" every layer at which the site is tapped; not
            read where no site has layers.
        sites: the sites of each of these layers.
        positions: the tokens.
        left: which of "layer" and "site" were omitted. Allowed only with registered names: the
            taps are then those of the name, and `layers` and `sites` are ignored.
        heads: the attention heads that are edited or read, where the vectors of the site are of
            heads; the operation's vectors are then of one head. Empty: the whole vector.
    """

    layers: Layers
    sites: Sites
    positions: Positions
    left: tuple[str, ...]
    heads: tuple[int, ...]

    # `op` of the JSON form; empty: the form has no `op`.
    op: ClassVar[str] = ""
    reads_last: ClassVar[bool] = False  # whether it can select "last_row": it changes nothing

    @abstractmethod
    def __init__(self, *args: object, **fields: object) -> None:
        """Create an operation; each field accepts any of its forms."""

    @abstractmethod
    def own(self) -> dict[str, Any]:
        """Return the constructor's arguments by name, except layer, site and positions."""

    @abstractmethod
    def instructions(self, width: int) -> tuple[Instruction, ...]:
        """Return the device instructions for vectors of one size, whatever `heads` are."""

    def steps(self, size: VectorSize) -> tuple[Instruction, ...]:
        """Return the device instructions for the vectors of one tap."""
        if not self.heads:
            return self.instructions(size)
        steps = self.instructions(head_size(self.heads, size))
        return in_heads(steps, self.heads, size)

    @classmethod
    def parse(cls: type[T], value: object) -> T:
        """Read an operation of this class, or a dict of its arguments and optionally its `op`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            name = cls.__name__
            shown = f"{name}(…)" if cls.op else f"{name}(vector, layer=14)"
            problem = f"expected {shown}, or its dict, got {kind(value)}"
            raise SpecError("", problem + other_argument(value))
        if any(is_int(field) for field in value):
            problem = f"expected fields by name; write {cls.__name__}({{layer: vector, …}})"
            raise SpecError("", problem)
        required, optional = parameters_of(cls)
        fields = read_named(value, required, (*optional, "op") if cls.op else optional)
        if "op" in fields:
            with at("op"):
                read_word(fields.pop("op"), (cls.op,))
        return cls(**fields)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads, without omitted fields."""
        fields: dict[str, object] = {"op": self.op} if self.op else {}
        fields |= {name: _emit(value) for name, value in self.own().items()}
        # A single layer or site is written without a list, the usual form of the input.
        places: dict[str, object] = {"layer": self.layer, "site": self.site}
        fields |= {name: place for name, place in places.items() if place is not None}
        if self.heads:
            fields["head"] = self.heads[0] if len(self.heads) == 1 else list(self.heads)
        return fields | self.positions.to_dict()

    def __dir__(self) -> list[str]:
        return shown_names(self)

    def __repr__(self) -> str:
        fields = self.own()
        place = {"layer": self.layer, "site": self.site}
        fields |= {name: value for name, value in place.items() if value is not None}
        if self.heads:
            fields["head"] = one_or_all(list(self.heads))
        return short_repr(type(self), fields | self.positions.to_dict())

    def replace(self: T, **changes: object) -> T:
        """Return a copy with some of the constructor's arguments changed."""
        arguments = {**self.own(), "layer": self.layers, "site": self.sites}
        arguments = {name: value for name, value in arguments.items() if name not in self.left}
        if not self.sites.in_layers:
            del arguments["layer"]
        if self.heads:
            arguments["head"] = self.heads
        return type(self)(**{**arguments, "positions": self.positions, **changes})

    @property
    def layer(self) -> Any:
        """The layer, as the argument of that name: an int, a list, "all", or None without any."""
        if "layer" in self.left or not self.sites.in_layers:
            return None
        return one_or_all(self.layers.emit())

    @property
    def site(self) -> Any:
        """The site, as the argument of that name: a name, a list, or None if it was omitted."""
        return None if "site" in self.left else one_or_all(self.sites.emit())

    def names(self) -> tuple[str, ...]:
        """Return the names of the registered vectors in use, each once."""
        return tuple(dict.fromkeys([vector.name for vector in self._named()]))

    def per_layer(self: T) -> tuple[T, ...]:
        """Return one operation per layer if each layer has its own vector, else itself."""
        return (self,)

    @property
    def is_bound(self) -> bool:
        """Whether `bind` would return the operation itself."""
        return not self.names() and len(self.per_layer()) == 1

    def bind(self: T, lookup: Lookup, num_layers: int | None = None) -> tuple[T, ...]:
        """Return copies with names replaced by vectors: one per tap of the names.

        An operation without names, or whose names have no taps, gives one copy. An omitted layer
        or site selects all those of the name: `Steer("happy")` gives one Steer for each of the
        name's taps, `Steer("happy", layer=5)` one for each of its taps at layer 5. "all" layers
        selects all layers of the name. Negative layers match no name if `num_layers` is None.
        """
        parts = self.per_layer()
        if len(parts) > 1:
            return tuple(operation for part in parts for operation in part.bind(lookup, num_layers))
        if not self.names():
            return (self,)
        registered = {name: vectors_of(name, lookup) for name in self.names()}
        layers = from_start(self.layers, num_layers)
        taps = find_taps(registered, layers, self.sites, self.left)
        if taps is None:
            return (self._with({name: vectors[None] for name, vectors in registered.items()}),)
        return tuple(
            self._with(
                {name: pick(name, vectors, tap) for name, vectors in registered.items()},
                site=tap[0],
                layer=tap[1],
            )
            for tap in taps
        )

    def bound(self, vectors: dict[str, Vector]) -> dict[str, object]:
        """Return the constructor's arguments with each name replaced by its vector."""
        return {
            name: tuple(_value(row, vectors) for row in value)
            if isinstance(value, tuple)
            else _value(value, vectors)
            for name, value in self.own().items()
        }

    def _with(self: T, vectors: dict[str, Vector], **place: object) -> T:
        return self.replace(**self.bound(vectors), **place)

    def _named(self) -> list[Named]:
        values = self.own().values()
        rows = [row for value in values if isinstance(value, tuple) for row in value]
        return [value for value in (*values, *rows) if isinstance(value, Named)]

    def _set_place(
        self,
        layer: object,
        site: object,
        positions: object,
        phase: object,
        exclude: object,
        head: object = None,
    ) -> None:
        """Read the location. Must follow the operation's own fields: names allow omissions."""
        named = bool(self.names())
        layers, sites = read_taps(layer, site, "layer", "site")
        left = [name for name, value in (("layer", layers), ("site", sites)) if value is None]
        if "layer" in left and not named:
            raise SpecError(
                "layer", "missing; it can be omitted only where the vector is a registered name"
            )
        self._set(layers=layers or Layers("all"), sites=sites or Sites(SITE))
        if "logits" in self.sites and self.op != "bias":
            raise SpecError("site", LOGITS)
        ends = [name for name in self.sites if name in ENDS]
        if ends and self.sites.in_layers:
            raise SpecError(
                "site", f"{ends[0]} has no layer and others have: use one edit for each"
            )
        self._set(heads=() if head is None else read_indices(head, "head"))
        selection = Positions.within(positions, phase, exclude)
        if not self.reads_last and "last_row" in selection.include:
            raise SpecError(
                selection.path(selection.include.index("last_row")),
                '"last_row" is unsupported in edits, because it is known only when generation has '
                'ended; use "last_prompt" or "generated"',
            )
        self._set(positions=selection, left=tuple(left) if named else ())


def read_scalar(value: object) -> float:
    """Read a number within float32's range; −0.0 becomes 0.0, so that equal values emit alike."""
    return read_float32(value) + 0.0


def by_value(vector: Vector | Named, width: int) -> Vector:
    """Return the vector after checking that it is bound and has this width."""
    if isinstance(vector, Named):
        raise SpecError("", f"the vector `{vector.name}` is not registered")
    if vector.size != width:
        size = width if isinstance(width, VectorSize) else VectorSize(width)
        raise SpecError("", f"expected {size} numbers, {size.meaning}, got {vector.size}")
    return vector


def rows_by_value(
    field: str, rows: tuple[Vector, ...] | tuple[Vector | Named, ...], width: int
) -> tuple[Vector, ...]:
    """Return the rows after checking that each is bound and has this width."""
    return read_each(field, rows, lambda row: by_value(row, width))


def read_norm(value: object) -> str | None:
    """Read the argument `norm` of an edit that does not scale to the norm of h."""
    with at("norm"):
        return None if value is None else read_word(value, ("keep",))


def one_edit(
    steps: list[Instruction], norm: str | None = None, in_turn: bool = False
) -> tuple[Instruction, ...]:
    """Return one edit's instructions with its flags: all read the same h, or with `in_turn` what
    those before made of it. With `norm` "keep" the last rescales to the norm of h.
    """
    if norm == "keep":
        steps[-1] = steps[-1].with_flags(Flags.KEEP)
    if in_turn:
        steps = [step.with_flags(Flags.FRESH) if step.reads else step for step in steps]
    else:
        steps = refreshed(steps)
    steps[-1] = steps[-1].with_flags(Flags.COUNTED)
    return tuple(steps)


def refreshed(steps: list[Instruction]) -> list[Instruction]:
    """Return an edit's instructions with FRESH on the first that reads h, or first to keep norm."""
    keeps = Flags.KEEP in steps[-1].flags
    for index, step in enumerate(steps):
        if step.reads or keeps:
            return [*steps[:index], step.with_flags(Flags.FRESH), *steps[index + 1 :]]
    return steps


def one_or_all(value: object) -> object:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _emit(value: object) -> object:
    if isinstance(value, tuple):
        return emit_rows(value)
    return value.emit() if hasattr(value, "emit") else value


def _value(value: object, vectors: dict[str, Vector]) -> object:
    return vectors[value.name] if isinstance(value, Named) else value
