"""Types of what constructors accept, without NumPy and torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, SupportsFloat, SupportsIndex

from midstream.plan.positions.items import Value
from midstream.plan.positions.positions import Positions
from midstream.plan.selection import Layers, Sites
from midstream.plan.vectors.named_vector import Named
from midstream.plan.vectors.vector import Vector
from midstream.sites import HookName, SiteName


class SupportsArray(Protocol):
    """A NumPy array, a torch tensor, or anything that NumPy makes an array of."""

    def __array__(self) -> Any:
        """Return a NumPy array."""


class SupportsEdit(Protocol):
    """What stands for an edit where one is expected, as a `Direction` or `Directions`."""

    def as_edit(self) -> Any:
        """Return the edit."""


# A Python, NumPy or torch number.
NumberLike = SupportsFloat
# A vector by value, [width]; a mapping is its JSON form.
VectorLike = Vector | Sequence[float] | SupportsArray | Mapping[str, Any]
# A vector by value, or the name of registered vectors.
VectorOrName = VectorLike | Named | str
# A vector by value and its layer: `Steer(vector, layer)`.
PlacedVector = tuple[VectorLike, SupportsIndex]
# Rows by value, [rows, width], or one row; or one per layer, {layer: vector}.
RowsLike = VectorLike | Sequence[VectorLike] | Mapping[int, VectorLike]
RowsOrNames = VectorOrName | Sequence[VectorOrName] | Mapping[int, VectorLike]
# A square matrix by value, [width, width], or the name of registered ones.
MatrixOrName = Sequence[VectorLike] | SupportsArray | Mapping[str, Any] | Named | str
LayersLike = SupportsIndex | Literal["all"] | Sequence[SupportsIndex] | SupportsArray | Layers
# Of names that have a layer, which no type lists, a type checker accepts a `HookName`.
SitesLike = SiteName | HookName | Sequence[SiteName | HookName] | Sites
IndicesLike = SupportsIndex | Sequence[SupportsIndex] | SupportsArray
# The id of a feature, several ids, or {id: value}.
FeaturesLike = (
    SupportsIndex | Sequence[SupportsIndex] | Mapping[int, NumberLike] | Mapping[str, NumberLike]
)
PhaseLike = Literal["all", "prompt", "generated"]
PositionWord = Literal["all", "prompt", "generated", "last_prompt", "last_row"]
PositionItem = PositionWord | SupportsIndex | slice | range | Value | Mapping[str, Any]
PositionsLike = PositionItem | Sequence[PositionItem] | SupportsArray | Positions
