"""`UnitLayer`: what is made of the units of a hidden layer, in float64."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

_ELEMENTS = 1 << 20  # of the products that are computed at once


@dataclass(frozen=True, slots=True)
class UnitLayer:
    """The layer behind a hidden one: weights · act(units) + biases.

    Attributes:
        activation: see `ACTIVATIONS` of `midstream.ops.layout`.
        units: number of units of the hidden layer.
        weights: little-endian float32 [outputs, units].
        biases: likewise [outputs]; empty: zeros.
    """

    activation: str
    units: int
    weights: bytes
    biases: bytes = b""

    @property
    def outputs(self) -> int:
        return len(self.weights) // (4 * self.units)

    def follow(self, units: Array) -> Array:
        """Return float64 [n, outputs] of the sums of units, [n, units], before their activation."""
        import numpy as np

        weights, biases = _arrays(self)
        active = _activated(self.activation, units)
        out = np.empty((len(units), self.outputs))
        many = max(1, _ELEMENTS // weights.size)
        # Not a product of matrices, which for one row is not that of the row among others.
        for start in range(0, len(units), many):
            products = np.multiply(active[start : start + many, None], weights, order="C")
            out[start : start + many] = products.sum(2)
        out += biases
        return out


@functools.lru_cache(maxsize=64)
def _arrays(layer: UnitLayer) -> tuple[Any, Any]:
    import numpy as np

    weights = np.frombuffer(layer.weights, "<f4").astype(np.float64).reshape(-1, layer.units)
    biases = np.frombuffer(layer.biases, "<f4").astype(np.float64)
    return weights, biases if len(biases) else np.zeros(len(weights))


def _activated(activation: str, values: Array) -> Array:
    import numpy as np

    if activation == "relu":
        return np.maximum(values, 0.0)
    if activation == "tanh":
        return np.tanh(values)
    if activation == "silu":
        silu: Array = values / (1 + np.exp(-values))
        return silu
    assert activation == "gelu"
    # NumPy has no error function.
    errors: Any = np.frompyfunc(math.erf, 1, 1)(values / math.sqrt(2))
    gelu: Array = values * (0.5 * (1 + errors.astype(np.float64)))
    return gelu
