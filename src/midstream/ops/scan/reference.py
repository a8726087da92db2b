"""Reference implementation of SCANs in PyTorch, which also runs on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.ops.reference_state import is_listed

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

_STEP, _OTHER_IDS = int(Flags.STEP), int(Flags.OTHER_IDS)


@torch.no_grad()
def scan_ref(
    hidden: Tensor,
    residual: Tensor | None,
    tokens: Tensor,
    ids: Tensor,
    tally: Tensor,
    table: Tensor,
    instructions: Tensor,
    params: Tensor,
    lists: Tensor,
    bank: Tensor,
    scores: Tensor,
    scans: Tensor,
    states: Tensor,
) -> None:
    """Write the scores of the SCANs at one site, [rows, slots], what they remember after each row
    in the last of these columns, their states, [n, kept, 3], and NONFINITE of `tally` where a
    reading is. Arguments are as for `midstream.ops.site`.
    """
    armed: Ints = scans.numpy()
    site: Ints = table.numpy()
    is_here = armed[:, layout.SCAN_SITE] == site[0, layout.CODE]
    here = (is_here & (armed[:, layout.SCAN_COUNT] > 0)).nonzero()[0]
    if not here.size:
        return
    words: Ints = tokens.numpy()
    every_score: Floats = scores.numpy()
    every: Ints = instructions.numpy()
    for index in here.tolist():
        first, count, slot = armed[index, : layout.SCAN_SITE].tolist()
        rows = np.arange(first, first + count)
        which = _instruction_of_rows(words[rows, layout.PROGRAM], site, every, slot)
        rows, which = rows[which >= 0], which[which >= 0]
        if not rows.size:
            continue
        read = _read(hidden, residual, bank, rows, every[which, layout.READ])
        x = read + params[torch.from_numpy(which), layout.A].numpy()
        applies = _applies(every[which], lists.numpy(), ids.numpy()[rows])
        positions = words[rows, layout.POSITION]
        state = _State(states[index].numpy(), int(positions[0]))
        columns = (x, positions, applies, params.numpy()[which], every[which])
        for row, reading, position, applied, numbers, word in zip(rows, *columns, strict=True):
            if applied:
                state.update(reading, numbers, int(word[layout.WRITE]))
            scores[row, slot - 1] = state.score(bool(word[layout.FLAGS] & _STEP))
            pair = every_score.shape[1] + layout.MEMORY_COLUMNS * (index - len(armed))
            every_score[row, pair] = state.smoothed
            every_score[row, pair + 1] = np.int32(state.left).view(np.float32)
            state.keep(int(position))
        spoiled = rows[applies & ~np.isfinite(x)]
        tally.numpy()[spoiled, layout.NONFINITE] = 1


def _instruction_of_rows(programs: Ints, site: Ints, every: Ints, slot: int) -> NDArray[np.int64]:
    """Return the SCAN with a slot in the program of each row at this site; −1: there is none."""
    numbers = np.full(programs.shape, -1, np.int64)
    for program in np.unique(programs):
        if program == layout.IDLE_PROGRAM:
            continue
        start, count = site[program, layout.EDIT_START], site[program, layout.EDIT_COUNT]
        mine = every[start : start + count]
        is_one = (mine[:, layout.OP] == Op.SCAN) & (mine[:, layout.SLOT] == slot)
        for at in np.flatnonzero(is_one):
            numbers[programs == program] = start + at
    return numbers


def _read(
    hidden: Tensor, residual: Tensor | None, bank: Tensor, rows: NDArray[np.int64], starts: Ints
) -> Floats:
    """Return ⟨h, read⟩ of some rows, h the stream on entry, float32 [n]."""
    where = torch.from_numpy(rows)
    stream = hidden[where].float()
    if residual is not None:
        stream = stream + residual[where].float()
    numbers, unit, width = bank.view(-1), bank.shape[1], hidden.shape[1]
    readings = np.zeros(rows.size, np.float32)
    for start in np.unique(starts):
        vector = numbers[int(start) * unit : int(start) * unit + width]
        mine = starts == start
        readings[mine] = (stream[torch.from_numpy(mine)] * vector).sum(1).numpy()
    return readings


def _applies(words: Ints, lists: Ints, ids: Ints) -> NDArray[np.bool_]:
    mask = np.ones(len(words), np.bool_)
    for row in np.flatnonzero(words[:, layout.IDS_COUNT]):
        (listed,) = is_listed(words[row], lists, ids[row : row + 1])
        mask[row] = listed != bool(words[row, layout.FLAGS] & _OTHER_IDS)
    return mask


@dataclass(slots=True, init=False)
class _State:
    """The state of a request's tokens up to one; `kept`, int32 [kept, 3], was last written `at`."""

    kept: Ints
    at: int
    smoothed: np.float32
    left: int

    def __init__(self, kept: Ints, position: int) -> None:
        """Start from the last state before a position, and drop the states from there on."""
        self.kept = kept
        marks = kept[:, layout.STATE_POSITION]
        marks[marks > position] = 0
        self.at = int(marks.argmax())
        self.smoothed, self.left = np.float32(0), -1
        if marks[self.at]:
            self.smoothed = kept[self.at, layout.STATE_SCORE].view(np.float32)
            self.left = int(kept[self.at, layout.STATE_LEFT])

    def update(self, x: np.float32, numbers: Floats, hold: int) -> None:
        """Read the score of the next token."""
        _, opens, closes, weight = numbers
        if weight == 1 or self.left < 0:
            self.smoothed = x
        else:
            with np.errstate(invalid="ignore"):
                self.smoothed = self.smoothed + weight * (x - self.smoothed)
        is_open = bool(self.smoothed > (closes if self.left > 0 else opens))
        self.left = 1 + hold if is_open else max(self.left - 1, 0)

    def score(self, step: bool) -> float:
        """Return what gates read."""
        return float(self.left > 0) if step else float(self.smoothed)

    def keep(self, position: int) -> None:
        self.at = (self.at + 1) % len(self.kept)
        bits = np.float32(self.smoothed).view(np.int32)
        self.kept[self.at] = (1 + position, bits, self.left)
