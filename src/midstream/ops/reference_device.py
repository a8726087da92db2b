"""The buffers of vectors and instructions of the `site` op, as its reference reads them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.ops import layout
from midstream.ops.layout import Flags
from midstream.ops.sae.reference import SaeBuffers

Ints = NDArray[np.int32]

# A plain integer: IntFlag operations create objects, at ten times the cost.
_COUNTED = int(Flags.COUNTED)


@dataclass(frozen=True, slots=True)
class Device:
    """The op's device buffers; integer buffers as NumPy arrays.

    Attributes:
        bank: float32 [starts, W], the vector that starts at each unit.
        units: units of a vector.
        numbers: float32 [V · U], the bank as one vector.
        sae: what CODEs need; None: there is none.
    """

    instructions: Ints
    params: Tensor
    lists: Ints
    bank: Tensor
    scores: Tensor
    ids: Ints
    units: int
    numbers: Tensor
    sae: SaeBuffers | None

    def sum_plain(self, start: int, stop: int) -> tuple[Tensor, int]:
        """Return the sum of plain instructions, which add the same to every row.

        Returns:
            float32 [W] and the number of COUNTED instructions.
        """
        words = self.instructions[start:stop].tolist()
        scales = self.params[start:stop, layout.A].tolist()
        delta = torch.zeros(self.bank.shape[1])
        for word, scale in zip(words, scales, strict=True):
            if scale:
                # Two roundings: with a fused multiply-add, +v and −v would not cancel.
                delta += self.bank[word[layout.WRITE]] * scale
        return delta, sum(word[layout.FLAGS] & _COUNTED != 0 for word in words)

    def vectors(self, rows: NDArray[np.integer]) -> Tensor:
        """Return the vectors that start at units of the bank: [n, W], or [1, W] if all are the
        same.
        """
        first = int(rows[0])
        if (rows == first).all():
            return self.bank[first : first + 1]
        return self.bank[torch.from_numpy(rows.astype(np.int64))]

    def matrix(self, start: int) -> Tensor:
        """Return the matrix whose rows begin at a unit of the bank, [W, W]."""
        width = self.bank.shape[1]
        return self.bank[start : start + (width - 1) * self.units + 1 : self.units]

    def above(self, base: Tensor, which: Ints) -> Tensor:
        """Return what a RAISE makes of components where its vector is 0, [n, 1]."""
        margin = self.params[torch.from_numpy(which.astype(np.int64)), layout.B]
        largest = base.amax(1)
        return (largest + margin * largest.abs().clamp_min(1.0))[:, None]

    def mapped(self, base: Tensor, starts: Ints) -> Tensor:
        """Return the products of each row with its matrix, [n, W]."""
        products = torch.empty_like(base)
        for start in np.unique(starts):
            rows = torch.from_numpy(starts == start)
            products[rows] = base[rows] @ self.matrix(int(start)).T
        return products
