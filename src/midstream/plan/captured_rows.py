"""`CapturedRows`: a reference to rows that a server cached for an earlier request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeGuard

from midstream.errors import SpecError
from midstream.plan.argument_names import FrozenFields
from midstream.plan.forms import IndicesLike
from midstream.plan.heads import read_ordered_indices
from midstream.plan.vectors.vector import Vector
from midstream.sites import Tap
from midstream.validation import at, kind, read_fields, show

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, init=False)
class CapturedRows(FrozenFields):
    """Rows that a server cached for an earlier request of the same client, by their id.

    They are the rows of a `Replace` without being sent: each of its sites and layers gets the rows
    that were captured there.

    Attributes:
        id: the `id` in the `activations` of that request's answer.
        positions: positions in that request whose rows are used, in this order; empty: all that
            were captured, ascending.
    """

    id: str
    positions: tuple[int, ...]

    def __init__(self, id: str, positions: IndicesLike | None = None) -> None:
        """Create a reference.

        Args:
            id: the id of the rows.
            positions: a position in the captured request, counted from 0, or several.

        Raises:
            SpecError: a field is malformed.
        """
        with at("captured"):
            if not isinstance(id, str):
                raise SpecError("", f"expected the id of cached rows, `str`, got {kind(id)}")
            if not _ID.fullmatch(id):
                raise SpecError("", f"expected the id of cached rows, got {show(id)}")
        indices = () if positions is None else read_ordered_indices(positions, "positions")
        self._set(id=id, positions=indices)

    @staticmethod
    def parse(value: object) -> CapturedRows:
        """Read a CapturedRows, or `{"captured": id, "positions": [3, 4]}`."""
        if isinstance(value, CapturedRows):
            return value
        fields = read_fields(value, required=("captured",), optional=("positions",))
        return CapturedRows(fields["captured"], fields.get("positions"))

    def at(self, positions: IndicesLike) -> CapturedRows:
        """Return a reference to the rows at other positions of the same request."""
        return CapturedRows(self.id, positions)

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        fields: dict[str, object] = {"captured": self.id}
        return fields | ({"positions": list(self.positions)} if self.positions else {})


def is_captured(value: object) -> TypeGuard[CapturedRows | Mapping[str, object]]:
    return isinstance(value, CapturedRows) or (isinstance(value, Mapping) and "captured" in value)


class EarlierRows(Protocol):
    """Rows of one earlier request."""

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The taps at which rows were captured."""

    def positions(self, tap: Tap) -> tuple[int, ...]:
        """Return the positions of the rows of a tap, ascending."""

    def read(self, tap: Tap, positions: tuple[int, ...]) -> tuple[Vector, ...]:
        """Return the rows of a tap at some positions, in their order; (): all."""


# Returns the rows of an id; raises SpecError if there are none.
OpenRows = Callable[[str], EarlierRows]
