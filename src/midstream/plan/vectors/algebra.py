"""Vector algebra on the host, in float64: unit vectors, orthonormal bases, Gram errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from midstream.errors import SpecError
from midstream.plan.vectors.device_row import DeviceRow
from midstream.plan.vectors.vector import Vector

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Rounding to float32 perturbs linearly dependent rows by about 1e-7 of their length.
_INDEPENDENT = 1e-6


def wide(vectors: Sequence[Vector]) -> NDArray[np.float64]:
    """Stack vectors of equal size into a float64 matrix [len(vectors), size]."""
    import numpy as np

    return np.stack([vector.numpy() for vector in vectors]).astype(np.float64)


def check_nonzero(vector: Vector, problem: str) -> None:
    if not vector.norm:
        raise SpecError("", problem)


@lru_cache(maxsize=256)
def unit(vector: Vector) -> Vector:
    """Return v/‖v‖; `vector` must not be zero."""
    if isinstance(vector, DeviceRow):
        return vector.unit()
    return Vector.parse(wide([vector])[0] / vector.norm)


@lru_cache(maxsize=64)
def orthonormal(rows: tuple[Vector, ...]) -> tuple[Vector, ...]:
    """Return an orthonormal basis of the rows' span; each row is orthogonalised twice."""
    import numpy as np

    basis: list[NDArray[np.float64]] = []
    for index, row in enumerate(wide(rows)):
        norm = np.linalg.norm(row)
        if norm == 0:
            raise SpecError(f"[{index}]", "the row is zero; expected a direction")
        rest = row / norm
        for _ in range(2):
            for vector in basis:
                rest = rest - (rest @ vector) * vector
        length = float(np.linalg.norm(rest))
        if length < _INDEPENDENT:
            raise SpecError(
                f"[{index}]",
                f"the row is linearly dependent on earlier rows (to within {length:.1g} of its "
                "length); remove it",
            )
        basis.append(rest / length)
    return tuple(Vector.parse(row) for row in basis)


def gram_error(rows: Sequence[Vector]) -> float:
    """Return the largest |⟨rᵢ, rⱼ⟩ − δᵢⱼ|: 0 for orthonormal rows."""
    import numpy as np

    matrix = wide(rows)
    return float(np.abs(matrix @ matrix.T - np.eye(len(rows))).max())
