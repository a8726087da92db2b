"""`CapturedRows`: a reference to rows that a server cached for an earlier request."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, SupportsIndex, TypeGuard, cast

from midstream.errors import SpecError
from midstream.plan.argument_names import FrozenFields, only_set
from midstream.plan.forms import IndicesLike
from midstream.plan.heads import read_ordered_indices
from midstream.plan.selection import read_site
from midstream.plan.vectors.vector import Vector
from midstream.sites import SiteName, Tap
from midstream.validation import at, kind, read_fields, read_int, show

_SHOWN = 8
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True, init=False)
class CapturedRows(FrozenFields):
    """Rows that a server cached for an earlier request of the same client, by their id.

    They are the rows of a `Replace` or a `Steer` without being sent: each of its sites and layers
    gets the rows that were captured there, or with `layer` those of that layer.

    Attributes:
        id: the `id` in the `activations` of that request's answer.
        positions: positions in that request whose rows are used, in this order; empty: all that
            were captured, ascending.
        layer: the layer that they are from; −1 is the last one. None: that of the edit.
        site: with `layer`, the site that they are from. None: that of the edit.
    """

    id: str
    positions: tuple[int, ...]
    layer: int | None
    site: str | None

    def __init__(
        self,
        id: str,
        positions: IndicesLike | None = None,
        layer: SupportsIndex | None = None,
        site: SiteName | None = None,
    ) -> None:
        """Create a reference.

        Args:
            id: the id of the rows.
            positions: a position in the captured request, counted from 0, or several.
            layer: a layer of the captured request.
            site: with `layer`: a site of it.

        Raises:
            SpecError: a field is malformed.
        """
        with at("captured"):
            if not isinstance(id, str):
                raise SpecError("", f"expected the id of cached rows, `str`, got {kind(id)}")
            if not _ID.fullmatch(id):
                raise SpecError("", f"expected the id of cached rows, got {show(id)}")
        indices = () if positions is None else read_ordered_indices(positions, "positions")
        if site is not None and layer is None:
            raise SpecError("site", "is for `layer`, which is missing")
        self._set(id=id, positions=indices)
        self._read_given(read_int, layer=layer)
        self._read_given(read_site, site=site)

    @staticmethod
    def parse(value: object) -> CapturedRows:
        """Read a CapturedRows, or `{"captured": id, "positions": [3, 4], "layer": 12}`."""
        if isinstance(value, CapturedRows):
            return value
        fields = read_fields(value, required=("captured",), optional=("positions", "layer", "site"))
        return CapturedRows(fields.pop("captured"), **fields)

    def at(self, positions: IndicesLike) -> CapturedRows:
        """Return a reference to the rows at other positions of the same request."""
        return CapturedRows(self.id, positions, self.layer, cast("SiteName | None", self.site))

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        more = {"positions": list(self.positions), "layer": self.layer, "site": self.site}
        return {"captured": self.id, **only_set(**more)}


def is_captured(value: object) -> TypeGuard[CapturedRows | Mapping[str, object]]:
    return isinstance(value, CapturedRows) or (isinstance(value, Mapping) and "captured" in value)


def no_rows(tap: Tap, known: Collection[Tap]) -> SpecError:
    """Return the error of a site and layer of which no rows were captured."""
    shown = ", ".join(f"{site} at layer {layer}" for site, layer in list(known)[:_SHOWN])
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return SpecError(
        "layer", f"no rows of {tap[0]} at layer {tap[1]} were captured; there are {shown}{more}"
    )


def not_here() -> SpecError:
    """Return the error of cached rows in a call of an engine."""
    return SpecError(
        "rows.captured",
        "rows that a server cached can be used only in a request to that server; give the rows "
        "themselves",
    )


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
