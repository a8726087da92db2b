"""What the reference of the `site` op reads and changes: buffers, and rows of the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.ops import layout
from midstream.ops.layout import Flags
from midstream.ops.row_views import Index, index
from midstream.ops.sae.reference import SaeBuffers

Ints = NDArray[np.int32]
Rows = NDArray[np.int64]

# A plain integer: IntFlag operations create objects, at ten times the cost.
_COUNTED, _FRESH = int(Flags.COUNTED), int(Flags.FRESH)


class PlainDose(NamedTuple):
    """Of an edit that only adds: its slot, what it adds, and what those before it added."""

    slot: int
    change: Tensor
    before: Tensor | None  # None: it is the first


@dataclass(frozen=True, slots=True)
class Device:
    """The op's device buffers; integer buffers as NumPy arrays."""

    instructions: Ints
    params: Tensor
    lists: Ints
    bank: Tensor  # float32 [starts, W], the vector that starts at each unit
    scores: Tensor
    ids: Ints
    doses: Ints  # of `tally`, [T, n]
    units: int  # of a vector
    numbers: Tensor  # the bank as one vector
    sae: SaeBuffers | None

    def sum_plain(self, start: int, stop: int) -> tuple[Tensor, int, list[PlainDose]]:
        """Return the sum of plain instructions, float32 [W], how many are COUNTED, and doses."""
        words = self.instructions[start:stop].tolist()
        scales = self.params[start:stop, layout.A].tolist()
        delta = torch.zeros(self.bank.shape[1])
        before = None  # the edit
        measured = []
        for number, (word, scale) in enumerate(zip(words, scales, strict=True)):
            slot = word[layout.SLOT]
            if number and self.doses.shape[1] and word[layout.FLAGS] & _FRESH:
                before = delta.clone()
            if scale:
                # Two roundings: with a fused multiply-add, +v and −v would not cancel.
                delta += self.bank[word[layout.WRITE]] * scale
            if slot:
                change = delta.clone() if before is None else delta - before
                measured.append(PlainDose(slot, change, before))
        return delta, sum(word[layout.FLAGS] & _COUNTED != 0 for word in words), measured

    def store_doses(
        self, rows: NDArray[np.integer], slot: int, change: Tensor, before: Tensor
    ) -> None:
        """Store how long an edit's change of rows is, [n, W] or [W], relative to these before."""
        moved = torch.linalg.vector_norm(change, dim=-1)
        ratio = (moved / torch.linalg.vector_norm(before, dim=-1)).numpy()
        # 0 / 0 is no change.
        ratio = np.where((moved == 0).numpy(), np.float32(0), ratio)
        bits = np.maximum(ratio.view(np.int32), layout.NO_CHANGE)
        self.doses[rows, slot - 1] = bits

    def vectors(self, rows: NDArray[np.integer]) -> Tensor:
        """Return the vectors that start at units of the bank: [n, W], or [1, W] if all are one."""
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

    def chosen(self, words: Ints) -> Tensor | None:
        """Return where the masks of instructions are not zero, bool [n, W]; None: everywhere."""
        masks = words[:, layout.MASK]
        if not masks.any():
            return None
        chosen = self.vectors(np.maximum(masks - 1, 0)) != 0
        return chosen | torch.from_numpy(masks == 0)[:, None]


def is_listed(word: Ints, lists: Ints, tokens: Ints) -> NDArray[np.bool_]:
    """Return which tokens, [n, ID_COLUMNS], an instruction's ids or bit name."""
    start, count = word[layout.IDS_START], word[layout.IDS_COUNT]
    if count == layout.BY_BIT:
        has_bit: NDArray[np.bool_] = (tokens[:, layout.SELECTED] >> start) & 1 != 0
        return has_bit
    return np.isin(tokens[:, layout.TOKEN_ID], lists[start : start + count])


class EditedRows:
    """Rows of the stream while instructions change them. Arguments `at` index them, ascending."""

    def __init__(self, count: int, width: int, entered: Tensor | None) -> None:
        self.delta = torch.zeros(count, width)  # the sum so far; where `whole`, the stream
        self.whole: Tensor | None = None  # bool [n, 1], where it was made anew
        self.entered = entered  # float32 [n, W]; None if no program reads it
        self.stale = np.zeros(count, np.bool_)  # whether it has changed since h was read
        self.moved = False
        if entered is not None:
            self.base = entered  # h: the stream at the last FRESH

    def now(self, rows: Index) -> Tensor:
        """Return the stream of some rows, float32 [n, W]."""
        assert self.entered is not None, "a plain program does not read the stream"
        stream = self.entered[rows] + self.delta[rows]
        return stream if self.whole is None else self.delta[rows].where(self.whole[rows], stream)

    def refresh(self, at: Rows) -> None:
        """Read h of rows `at` again."""
        if not self.moved or self.entered is None or not at.size:
            return
        if at.size == len(self.entered):
            self.base = self.now(slice(None))
        else:
            if self.base is self.entered:
                self.base = self.entered.clone()
            rows = index(at)
            self.base[rows] = self.now(rows)
        self.stale[at] = False

    def add(self, at: Rows, change: Tensor) -> None:
        """Add to rows `at`, float32 [n, W]."""
        if not self.moved and at.size == len(self.delta):
            self.delta = change
        else:
            self.delta[index(at)] += change
        self.moved = True
        self.stale[at] = True

    def make(self, at: Rows, made: Tensor, chosen: Tensor | None) -> None:
        """Make rows `at` anew, float32 [n, W], where `chosen`, bool [n, W]; None: everywhere."""
        rows = index(at)
        self.delta[rows] = made if chosen is None else made.where(chosen, self.now(rows))
        if self.whole is None:
            self.whole = torch.zeros(len(self.delta), 1, dtype=torch.bool)
        self.whole[rows] = True
        self.moved = True
        self.stale[at] = True

    def replace(self, at: Rows, made: Tensor, chosen: Tensor | None) -> None:
        """Replace h of rows `at`, adding what others of its edit have changed since; see `make`."""
        stale = self.stale[at]
        if stale.any():
            rows = index(at)
            moved = made + (self.now(rows) - self.base[rows])
            made = moved.where(torch.from_numpy(stale)[:, None], made)
        self.make(at, made, chosen)
