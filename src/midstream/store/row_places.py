"""Where the encoded rows of tokens are, so that any of them are copied by one call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from midstream.store.backends.base import File

# Of the sizes that rows and their distances are multiples of, in bytes.
_TYPES = {16: "<c16", 8: "<i8", 4: "<i4", 2: "<i2", 1: "|u1"}
_TOGETHER = 1 << 18  # bytes that are copied twice at once, in a processor's cache


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Rows of mapped files, of which none is unmapped as long as this exists."""

    files: Sequence[File]
    addresses: NDArray[np.int64]  # [n, taps], of each row's first byte in memory

    def copy(self, first: int, last: int, data: Tensor) -> None:
        """Copy the rows [first, last) to uint8 [last - first, taps, row_bytes]."""
        wanted = self.addresses[first:last].reshape(-1)
        low, width = int(wanted.min()), data.shape[-1]
        wanted = wanted - low
        # Not by torch: a thread of a process that a loader forked has none of its threads.
        target = data.numpy().reshape(-1, width)
        if not (wanted % width).any():
            # They are rows of one table.
            memory = _memory(low, (int(wanted.max()) // width + 1, width), width, 1)
            # Other modes copy twice.
            memory.take(wanted // width, axis=0, out=target, mode="clip")
            return
        size = math.gcd(16, width, int(np.gcd.reduce(wanted)))
        # Row i of this table begins at element i: NumPy's `take` would copy the whole table.
        shape = int(wanted.max()) // size + 1, width // size
        rows, numbers = _memory(low, shape, size, size), wanted // size
        elements, count = target.view(rows.dtype), max(1, _TOGETHER // width)
        for begin in range(0, numbers.size, count):
            elements[begin : begin + count] = rows[numbers[begin : begin + count]]


def _memory(address: int, shape: tuple[int, int], step: int, size: int) -> NDArray[Any]:
    """Return memory as rows that begin every `step` bytes, of elements of `size` bytes."""
    table: dict[str, Any] = {
        "version": 3,
        "typestr": _TYPES[size],
        "data": (address, False),
        "shape": shape,
        "strides": (step, size),
    }
    return np.asarray(SimpleNamespace(__array_interface__=table))
