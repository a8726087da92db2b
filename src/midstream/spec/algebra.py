"""The numbers that are worked out before a request runs: norms and bases in float64."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from midstream.errors import SpecError
from midstream.spec.vector import Vector

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Rows that came through float32 miss an exact dependence by some 1e-7 of their length.
_INDEPENDENT = 1e-6


def float32(value: float) -> float:
    """The nearest float32, as a float."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def wide(vectors: Sequence[Vector]) -> NDArray[np.float64]:
    """The vectors as rows, float64 [len(vectors), size]; their sizes are equal."""
    import numpy as np

    return np.stack([vector.numpy() for vector in vectors]).astype(np.float64)


def check_nonzero(vector: Vector, problem: str) -> None:
    """Refuses the vector that has no direction."""
    if not vector.numpy().any():
        raise SpecError("", problem)


@lru_cache(maxsize=256)
def unit(vector: Vector) -> Vector:
    """v/‖v‖, for v ≠ 0."""
    return Vector.parse(wide([vector])[0] / vector.norm)


@lru_cache(maxsize=64)
def orthonormal(rows: tuple[Vector, ...]) -> tuple[Vector, ...]:
    """An orthonormal basis of the rows' span, by Gram–Schmidt, done twice for its accuracy.

    Raises:
        SpecError: a row is zero, or depends on those before it to within 1e-6 of its length.
    """
    import numpy as np

    basis: list[NDArray[np.float64]] = []
    for index, row in enumerate(wide(rows)):
        norm = np.linalg.norm(row)
        if norm == 0:
            raise SpecError(f"[{index}]", "the row is zero, which is no direction")
        rest = row / norm
        for _ in range(2):
            for each in basis:
                rest = rest - (rest @ each) * each
        length = float(np.linalg.norm(rest))
        if length < _INDEPENDENT:
            raise SpecError(
                f"[{index}]",
                f"the row depends on those before it (to within {length:.1g} of its length); "
                "leave it out",
            )
        basis.append(rest / length)
    return tuple(Vector.parse(row) for row in basis)


def gram_error(rows: Sequence[Vector]) -> float:
    """The largest of |⟨rᵢ, rⱼ⟩ − δᵢⱼ|: how far the rows are from orthonormal."""
    import numpy as np

    matrix = wide(rows)
    return float(np.abs(matrix @ matrix.T - np.eye(len(rows))).max())
