"""Reference implementation of the `site` op in PyTorch, which also runs on the CPU.

Integer buffers are processed with NumPy, whose calls on small arrays cost a fraction of PyTorch's.
Rows of vectors are addressed by slices where they are evenly spaced, which avoids a copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.ops import layout
from midstream.ops.activations.reference import activated, norm, sigmoid
from midstream.ops.layout import Flags, Op
from midstream.ops.row_views import Index, by_unit, index, spaced
from midstream.ops.sae.reference import SaeBuffers, reconstruct

Ints = NDArray[np.int32]
Rows = NDArray[np.int64]
Flagged = NDArray[np.bool_] | bool

# Plain integers: IntFlag operations create objects, at ten times the cost.
_FRESH, _GATED, _KEEP, _COUNTED = (
    int(each) for each in (Flags.FRESH, Flags.GATED, Flags.KEEP, Flags.COUNTED)
)
_ROW_BY_POSITION, _STEP, _OTHER_IDS = (
    int(each) for each in (Flags.ROW_BY_POSITION, Flags.STEP, Flags.OTHER_IDS)
)
_ADDS, _UNITS = int(Flags.ADDS), int(Flags.UNITS)
_READING = (Op.CLIP, Op.LINEAR, Op.FEATURE)
_REPLACING = (Op.REPLACE, Op.RAISE, Op.MAP)


@torch.no_grad()
def site_ref(
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
    ring: Tensor,
    mapped: Tensor,
    sae: SaeBuffers | None = None,
    encodes: bool = False,
) -> None:
    """Run the op; see `midstream.ops.site.site`. It takes the tensors of `SiteBuffers` singly, and
    needs neither `mapped` nor `encodes`.
    """
    width = hidden.shape[1]
    units, numbers = width // bank.shape[1], bank.view(-1)
    bank, ring = by_unit(bank, width), by_unit(ring, width)
    words: Ints = tokens[: hidden.shape[0]].numpy()
    active = words[:, layout.PROGRAM].nonzero()[0]
    if not active.size:
        return
    if active.size < len(words):
        words = words[active]
    site: Ints = table.numpy()
    programs = site[words[:, layout.PROGRAM]]

    counted: Ints | int = 0
    spoiled: list[tuple[NDArray[np.integer], Flagged]] = []
    edited = programs[:, layout.EDIT_COUNT].nonzero()[0]
    if edited.size:
        device = _Device(
            instructions.numpy(),
            params,
            lists.numpy(),
            bank,
            scores,
            ids.numpy(),
            units,
            numbers,
            sae,
        )
        done, flagged = _edit(
            hidden, residual, device, active[edited], words[edited], programs[edited]
        )
        spoiled.append((active[edited], flagged))
        counted = np.zeros(active.size, np.int32)
        counted[edited] = done

    first = int(site[0, layout.FIRST])
    places = site[words[:, layout.GROUP], layout.PLACE]
    captured = (words[:, layout.RECORD] > 0) & (places > 0) & (first >= 0)
    if captured.any():
        targets = words[captured, layout.RECORD] + places[captured] + (first - 2)
        where = active[captured]
        flagged = _capture(hidden, residual, ring, index(where), spaced(targets))
        spoiled.append((where, flagged))

    totals: Ints = tally.numpy()
    rows = slice(None, len(words)) if active.size == active[-1] + 1 else active
    totals[rows, layout.SIGNATURE] += site[0, layout.CODE]
    totals[rows, layout.EDITS] += counted
    totals[rows, layout.CAPTURES] += captured
    for where, flagged in spoiled:
        if flagged is not False:
            totals[where, layout.NONFINITE] |= flagged


def _capture(
    hidden: Tensor, residual: Tensor | None, ring: Tensor, rows: Index, targets: Index
) -> Flagged:
    """Copy rows of the stream into the ring, rounded once; return which are not finite."""
    stream = hidden[rows]
    if residual is not None:
        rest = residual[rows]
        if isinstance(targets, slice) and stream.dtype == rest.dtype == ring.dtype:
            # PyTorch adds two half-precision values in float32 and rounds the sum once.
            torch.add(stream, rest, out=ring[targets])
            return _nonfinite(ring[targets])
        stream = stream.float() + rest.float()
    copied = stream.to(ring.dtype)
    ring[targets] = copied
    return _nonfinite(copied)


def _nonfinite(rows: Tensor) -> Flagged:
    """Return which rows have a value that is not finite; False: none."""
    low, high = torch.aminmax(rows)  # both are NaN if any value is
    if -math.inf < float(low) and float(high) < math.inf:
        return False
    return (~rows.isfinite().all(1)).numpy()


def _edit(
    hidden: Tensor,
    residual: Tensor | None,
    device: _Device,
    rows: Rows,
    words: Ints,
    programs: Ints,
) -> tuple[Ints | int, Flagged]:
    """Run the programs of the rows of `hidden` that have one at this site.

    Returns:
        int32 [n], or one number for all rows: COUNTED instructions executed per row.
        bool [n], or one for all rows: whether `NONFINITE` is set.
    """
    where = index(rows)
    starts, counts = programs[:, layout.EDIT_START], programs[:, layout.EDIT_COUNT]
    plain = bool((programs[:, layout.KIND] == layout.PLAIN).all())
    if plain and (starts == starts[0]).all() and (counts == counts[0]).all():
        delta, counted = device.sum_plain(int(starts[0]), int(starts[0] + counts[0]))
        return counted, _change(hidden, where, delta)
    work = _Work(device, hidden, residual, where, rows, words, reads=not plain)
    for nth in range(int(counts.max())):
        here = (counts > nth).nonzero()[0]
        work.step(here, starts[here] + nth)
    return work.done, work.spoiled | _change(hidden, where, work.delta)


def _change(hidden: Tensor, rows: Index, delta: Tensor) -> Flagged:
    """Add in float32, saturate, and round once; a `delta` of 0 changes no bit, not even a zero's
    sign.

    Returns:
        Which rows have a value that saturated or is not finite; False: none.
    """
    limit = layout.limit_of(str(hidden.dtype).removeprefix("torch."))
    delta = delta.masked_fill_(delta == 0, -0.0)
    if isinstance(rows, slice):
        changed = hidden[rows].add_(delta)
    else:
        changed = (hidden[rows] + delta).to(hidden.dtype)
    low, high = torch.aminmax(changed)
    flagged: Flagged = False
    if not (-limit <= float(low) and float(high) <= limit):
        beyond = (delta != 0) & ~(changed.abs() <= limit)
        flagged = (beyond | ~changed.isfinite()).any(1).numpy()
        changed.copy_(torch.where(beyond, changed.nan_to_num(0.0).clamp(-limit, limit), changed))
    if not isinstance(rows, slice):
        hidden[rows] = changed
    return flagged


@dataclass(frozen=True, slots=True)
class _Device:
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


class _Work:
    """State of the rows that are being edited. Arguments `at` and `here` index them, ascending.

    Attributes:
        delta: float32 [n, W], the sum of the contributions so far.
        entered: float32 [n, W], the stream on entry; None if no program reads it.
        base: float32 [n, W], h: the stream at the last FRESH.
        gate: float32 [n].
        units: float32 [n], the sum of UNITs that nothing has read yet.
        done: int32 [n], COUNTED instructions executed.
        spoiled: bool [n], whether a probe's score is not finite; False: none is.
    """

    def __init__(
        self,
        device: _Device,
        hidden: Tensor,
        residual: Tensor | None,
        where: Index,
        rows: Rows,
        words: Ints,
        reads: bool,
    ) -> None:
        self._device, self._rows, self._words = device, rows, words
        self.delta = torch.zeros(rows.size, hidden.shape[1])
        self.gate = torch.ones(rows.size)
        self.units = torch.zeros(rows.size)
        self.done = np.zeros(rows.size, np.int32)
        self.spoiled: Flagged = False
        self.entered: Tensor | None = None
        self._moved = False
        if reads:
            self.entered = hidden[where].float()
            if residual is not None:
                self.entered = self.entered + residual[where].float()
            self.base = self.entered

    def step(self, at: Rows, which: Ints) -> None:
        """Execute one instruction per row: row `at[k]` executes instruction `which[k]`."""
        words = self._device.instructions[which]
        applies = self._applies(at, which, words)
        if applies is not None:
            if not applies.any():
                return
            at, which, words = at[applies], which[applies], words[applies]
        flags, ops = words[:, layout.FLAGS], words[:, layout.OP]
        if self._moved and self.entered is not None:
            self._refresh(self.entered, at[(flags & _FRESH) != 0])
        first = int(ops[0])
        if (ops == first).all():
            self._execute(Op(first), at, which, words)
        else:
            for op in np.unique(ops):
                mine = ops == op
                self._execute(Op(op), at[mine], which[mine], words[mine])
        self.done[at] += (flags & _COUNTED) != 0

    def _refresh(self, entered: Tensor, at: Rows) -> None:
        """Update h of rows `at` to the current stream."""
        if at.size == len(entered):
            self.base = entered + self.delta
        elif at.size:
            if self.base is entered:
                self.base = entered.clone()
            rows = index(at)
            self.base[rows] = entered[rows] + self.delta[rows]

    def _applies(self, at: Rows, which: Ints, words: Ints) -> NDArray[np.bool_] | None:
        """Return whether each row's instruction applies to its token id; None: all apply."""
        listed = words[:, layout.IDS_COUNT] > 0
        if not listed.any():
            return None
        found = ~listed
        ids = self._device.ids[self._rows[at]]
        for each in np.unique(which[listed]):
            mine = which == each
            word = self._device.instructions[each]
            start = word[layout.IDS_START]
            wanted = self._device.lists[start : start + word[layout.IDS_COUNT]]
            others = bool(word[layout.FLAGS] & _OTHER_IDS)
            found[mine] = np.isin(ids[mine], wanted, invert=others)
        return found

    def _execute(self, op: Op, at: Rows, which: Ints, words: Ints) -> None:
        """Execute one operation on rows `at`."""
        a, b, c, d = self._device.params[torch.from_numpy(which.astype(np.int64))].unbind(1)
        if op is Op.GATE:
            self._set_gates(at, words, a, b, c)
        elif op is Op.PROBE:
            stored = words[:, layout.SLOT] > 0
            if stored.any():
                self._store(at[stored], words[stored], a[torch.from_numpy(stored)])
        elif op is Op.UNIT:
            read = self._read(index(at), words) + a
            self.units[index(at)] += b * activated(read, c)
        elif op is Op.CODE:
            self._code(at, words)
        elif op is not Op.SCAN:  # whose score is there already
            factor = self._factor(op, index(at), words, (a, b, c, d))
            self._add(op, at, which, words, factor)
            kept = (words[:, layout.FLAGS] & _KEEP) != 0
            if kept.any():
                self._restore_norm(at[kept], words[kept])

    def _seen(self, rows: Index, words: Ints) -> Tensor:
        """Return h as the instructions of some rows see it, [n, W]: zero where their mask is."""
        return self._masked(self.base[rows], words)

    def _masked(self, values: Tensor, words: Ints) -> Tensor:
        """Return [n, W] or [1, W] values, with zero where the mask of the instruction is zero."""
        masks = words[:, layout.MASK]
        if not masks.any():
            return values
        chosen = self._device.vectors(np.maximum(masks - 1, 0)) != 0
        chosen = chosen | torch.from_numpy(masks == 0)[:, None]
        return torch.where(chosen, values, 0.0)

    def _read(self, rows: Index, words: Ints) -> Tensor:
        """Return ⟨h, read⟩, [n]."""
        return (self._seen(rows, words) * self._device.vectors(words[:, layout.READ])).sum(1)

    def _store(self, at: Rows, words: Ints, a: Tensor) -> None:
        """Store the scores that PROBEs read of rows `at`."""
        place = self._places(at, words[:, layout.SLOT])
        adds = torch.from_numpy((words[:, layout.FLAGS] & _ADDS) != 0)
        summed = (words[:, layout.FLAGS] & _UNITS) != 0
        read = torch.where(
            torch.from_numpy(summed), self.units[index(at)], self._read(index(at), words)
        )
        if summed.any():
            self.units[index(at[summed])] = 0.0
        score = read + a + torch.where(adds, self._device.scores[place], 0.0)
        self._device.scores[place] = score
        infinite = ~np.isfinite(score.numpy())
        if infinite.any():
            self.spoiled = np.isin(np.arange(len(self.delta)), at[infinite]) | self.spoiled

    def _places(self, at: Rows, slots: Ints) -> tuple[Tensor, Tensor]:
        """Return the rows and columns of scores of rows `at` in slots, counted from 1."""
        return torch.from_numpy(self._rows[at]), torch.from_numpy(slots.astype(np.int64) - 1)

    def _factor(
        self, op: Op, rows: Index, words: Ints, params: tuple[Tensor, Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Return the factor f of the table in `layout`, [n], before gating."""
        a, b, c, d = params
        if op is Op.ADD_MATCHED:
            return a * norm(self._seen(rows, words))
        if op is Op.SCALE:
            return a - 1
        if op not in _READING:
            return a
        x = self._read(rows, words)
        if op is Op.CLIP:
            return c * (torch.clamp(x, a, b) - x)
        if op is Op.LINEAR:
            return a * (x + b)
        x = x + a
        return c * torch.where(x > b, x, 0.0) + d

    def _add(self, op: Op, at: Rows, which: Ints, words: Ints, factor: Tensor) -> None:
        """Add f · v; add exactly nothing where f or the gate is 0."""
        flags = words[:, layout.FLAGS]
        gated = (flags & _GATED) != 0
        if gated.any():
            gate = torch.where(torch.from_numpy(gated), self.gate[index(at)], 1.0)
            factor = torch.where(gate == 0, 0.0, factor * gate)
        live = factor.numpy() != 0
        if not live.all():
            if not live.any():
                return
            at, which, words, flags = at[live], which[live], words[live], flags[live]
            factor = factor[torch.from_numpy(live)]
        rows = index(at)
        if op is Op.SCALE:
            vectors = self.base[rows]
        elif op is Op.RECONSTRUCT:
            share = self._device.params[torch.from_numpy(which.astype(np.int64)), layout.B]
            vectors = self._sae.decoded[self._rows[at]] - share[:, None] * self.base[rows]
        else:
            write = words[:, layout.WRITE]
            by_position = (flags & _ROW_BY_POSITION) != 0
            if by_position.any():
                rows_before = by_position * self._words[at, layout.POSITION]
                write = write + rows_before * self._device.units
            vectors = self._device.vectors(write)
            if op is Op.MULTIPLY:
                vectors = vectors * self.base[rows]
            elif op in _REPLACING:
                base = self.base[rows]
                if op is Op.RAISE:
                    vectors = vectors + _above(self._device, base, which)
                elif op is Op.MAP:
                    vectors = vectors + _mapped(self._device, base, words[:, layout.READ])
                vectors = vectors - base
        vectors = self._masked(vectors, words)
        # The product is rounded separately, so that +v and −v cancel exactly.
        change = factor[:, None] * vectors
        if not self._moved and at.size == len(self.delta):
            self.delta = change
        else:
            self.delta[rows] += change
        self._moved = True

    def _code(self, at: Rows, words: Ints) -> None:
        """Store what the SAEs make of rows `at`."""
        sae, unit = self._sae, self._device.bank.shape[1] // self._device.units
        for start in np.unique(words[:, layout.READ]):
            mine = at[words[:, layout.READ] == start]
            described = self._device.numbers[int(start) * unit :]
            made = reconstruct(self.base[index(mine)], described, sae.weights)
            sae.decoded[self._rows[mine]] = made

    @property
    def _sae(self) -> SaeBuffers:
        assert self._device.sae is not None, "there are SAEs"
        return self._device.sae

    def _restore_norm(self, at: Rows, words: Ints) -> None:
        """Rescale the stream of rows `at` to the norm of h, where their mask is not zero."""
        assert self.entered is not None, "a program with KEEP is not plain"
        rows = index(at)
        stream = self.entered[rows] + self.delta[rows]
        wanted, found = norm(self._seen(rows, words)), norm(self._masked(stream, words))
        ratio = torch.where((found == 0) | (found == wanted), 1.0, wanted / found)
        # Not an addition to delta: where delta is large, its last digit may be larger than h.
        change = stream * ratio[:, None] - self.entered[rows]
        kept = (ratio[:, None] == 1) | (self._masked(torch.ones_like(stream), words) == 0)
        self.delta[rows] = torch.where(kept, self.delta[rows], change)

    def _set_gates(self, at: Rows, words: Ints, a: Tensor, b: Tensor, c: Tensor) -> None:
        slots = words[:, layout.SLOT]
        scored = slots > 0
        reads = ~scored | ((words[:, layout.FLAGS] & _ADDS) != 0)
        x = torch.zeros(at.size)
        if reads.any():
            mine = torch.from_numpy(reads)
            x[mine] = self._read(index(at[reads]), words[reads]) + a[mine]
        if scored.any():
            place = self._places(at[scored], slots[scored])
            x[torch.from_numpy(scored)] += self._device.scores[place]
        step = torch.from_numpy((words[:, layout.FLAGS] & _STEP) != 0)
        self.gate[index(at)] = torch.where(step, (x > b).float(), sigmoid(c * (x - b)))


def _above(device: _Device, base: Tensor, which: Ints) -> Tensor:
    """Return what a RAISE makes of components where its vector is 0, [n, 1]."""
    margin = device.params[torch.from_numpy(which.astype(np.int64)), layout.B]
    largest = base.amax(1)
    return (largest + margin * largest.abs().clamp_min(1.0))[:, None]


def _mapped(device: _Device, base: Tensor, starts: Ints) -> Tensor:
    """Return the products of each row with its matrix, [n, W]."""
    found = torch.empty_like(base)
    for start in np.unique(starts):
        mine = torch.from_numpy(starts == start)
        found[mine] = base[mine] @ device.matrix(int(start)).T
    return found
