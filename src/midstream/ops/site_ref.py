"""Reference implementation of the `site` op in PyTorch and NumPy, which also runs on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.ops import layout
from midstream.ops.activations.reference import activated, norm, sigmoid
from midstream.ops.layout import Flags, Op
from midstream.ops.reference_state import Device, EditedRows, Ints, Rows, is_listed
from midstream.ops.row_pairs import Flagged, nonfinite, write_rows
from midstream.ops.row_views import Index, by_unit, index, spaced
from midstream.ops.sae.reference import SaeBuffers, reconstruct

# Plain integers: IntFlag operations create objects, at ten times the cost.
_FRESH, _GATED, _KEEP, _COUNTED = (
    int(flag) for flag in (Flags.FRESH, Flags.GATED, Flags.KEEP, Flags.COUNTED)
)
_ROW_BY_POSITION, _STEP, _OTHER_IDS = (
    int(flag) for flag in (Flags.ROW_BY_POSITION, Flags.STEP, Flags.OTHER_IDS)
)
_ADDS, _UNITS = int(Flags.ADDS), int(Flags.UNITS)
_READING = (Op.CLIP, Op.LINEAR, Op.FEATURE)


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
    """Run the op; see `midstream.ops.site.site`. Neither `mapped` nor `encodes` is needed."""
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
        device = Device(
            instructions.numpy(),
            params,
            lists.numpy(),
            bank,
            scores,
            ids.numpy(),
            tally.numpy()[:, layout.DOSES :],
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
            return nonfinite(ring[targets])
        stream = stream.float() + rest.float()
    copied = stream.to(ring.dtype)
    ring[targets] = copied
    return nonfinite(copied)


def _edit(
    hidden: Tensor,
    residual: Tensor | None,
    device: Device,
    rows: Rows,
    words: Ints,
    programs: Ints,
) -> tuple[Ints | int, Flagged]:
    """Run the rows' programs; return how many instructions COUNTED, and whether `NONFINITE`."""
    where = index(rows)
    starts, counts = programs[:, layout.EDIT_START], programs[:, layout.EDIT_COUNT]
    plain = bool((programs[:, layout.KIND] == layout.PLAIN).all())
    if plain and (starts == starts[0]).all() and (counts == counts[0]).all():
        delta, counted, measured = device.sum_plain(int(starts[0]), int(starts[0] + counts[0]))
        if measured:
            entered = _entered(hidden, residual, where)
            for slot, change, before in measured:
                stream = entered if before is None else entered + before
                device.store_doses(rows, slot, change, stream)
        return counted, write_rows(hidden, residual, where, delta)
    reads = not plain or device.doses.shape[1] > 0
    work = _Work(device, hidden, residual, where, rows, words, reads)
    for step in range(int(counts.max())):
        here = (counts > step).nonzero()[0]
        work.step(here, starts[here] + step)
    spoiled = write_rows(hidden, residual, where, work.stream.delta, work.stream.whole)
    return work.done, work.spoiled | spoiled


def _entered(hidden: Tensor, residual: Tensor | None, rows: Index) -> Tensor:
    """Return rows of the stream on entry, float32."""
    entered = hidden[rows].float()
    return entered if residual is None else entered + residual[rows].float()


class _Work:
    """State of the rows that are being edited. Arguments `at` and `here` index them, ascending."""

    def __init__(
        self,
        device: Device,
        hidden: Tensor,
        residual: Tensor | None,
        where: Index,
        rows: Rows,
        words: Ints,
        reads: bool,
    ) -> None:
        self._device, self._rows, self._words = device, rows, words
        self.gate = torch.ones(rows.size)
        self.units = torch.zeros(rows.size)  # the sum of UNITs that nothing has read yet
        self.done = np.zeros(rows.size, np.int32)  # COUNTED instructions
        self.spoiled: Flagged = False  # a probe's score is not finite
        entered = _entered(hidden, residual, where) if reads else None
        self.stream = EditedRows(rows.size, hidden.shape[1], entered)

    def step(self, at: Rows, which: Ints) -> None:
        """Execute one instruction per row: row `at[k]` executes instruction `which[k]`."""
        words = self._device.instructions[which]
        applies = self._applies(at, which, words)
        if applies is not None:
            if not applies.any():
                return
            at, which, words = at[applies], which[applies], words[applies]
        flags, ops = words[:, layout.FLAGS], words[:, layout.OP]
        self.stream.refresh(at[(flags & _FRESH) != 0])
        first = int(ops[0])
        if (ops == first).all():
            self._execute(Op(first), at, which, words)
        else:
            for op in np.unique(ops):
                mine = ops == op
                self._execute(Op(op), at[mine], which[mine], words[mine])
        self.done[at] += (flags & _COUNTED) != 0

    def _applies(self, at: Rows, which: Ints, words: Ints) -> NDArray[np.bool_] | None:
        """Return whether each row's instruction applies to its token id; None: all apply."""
        listed = words[:, layout.IDS_COUNT] != 0
        if not listed.any():
            return None
        mask: NDArray[np.bool_] = ~listed
        tokens = self._device.ids[self._rows[at]]
        for instruction in np.unique(which[listed]):
            mine = which == instruction
            word = self._device.instructions[instruction]
            chosen = is_listed(word, self._device.lists, tokens[mine])
            mask[mine] = chosen != bool(word[layout.FLAGS] & _OTHER_IDS)
        return mask

    def _execute(self, op: Op, at: Rows, which: Ints, words: Ints) -> None:
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
            self._apply(op, at, which, words, factor)
            kept = (words[:, layout.FLAGS] & _KEEP) != 0
            if kept.any():
                self._restore_norm(at[kept], words[kept])
            self._measure(at, words[:, layout.SLOT])

    def _seen(self, rows: Index, words: Ints) -> Tensor:
        """Return h as the instructions of some rows see it, [n, W]: zero where their mask is."""
        return self._masked(self.stream.base[rows], words)

    def _masked(self, values: Tensor, words: Ints) -> Tensor:
        """Return [n, W] or [1, W] values, with zero where the mask of the instruction is zero."""
        chosen = self._device.chosen(words)
        return values if chosen is None else torch.where(chosen, values, 0.0)

    def _read(self, rows: Index, words: Ints) -> Tensor:
        return (self._seen(rows, words) * self._device.vectors(words[:, layout.READ])).sum(1)

    def _store(self, at: Rows, words: Ints, a: Tensor) -> None:
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
            self.spoiled = np.isin(np.arange(len(self.done)), at[infinite]) | self.spoiled

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

    def _apply(self, op: Op, at: Rows, which: Ints, words: Ints, factor: Tensor) -> None:
        """Change the stream; leave it exactly as it is where f or the gate is 0."""
        gated = (words[:, layout.FLAGS] & _GATED) != 0
        gate = torch.ones(at.size)
        if gated.any():
            gate = torch.where(torch.from_numpy(gated), self.gate[index(at)], gate)
            factor = torch.where(gate == 0, 0.0, factor * gate)
        live = factor.numpy() != 0
        if not live.all():
            if not live.any():
                return
            chosen = torch.from_numpy(live)
            at, which, words = at[live], which[live], words[live]
            factor, gate = factor[chosen], gate[chosen]
        if op < Op.REPLACE:
            vectors = self._masked(self._device.vectors(self._writes(at, words)), words)
            # The product is rounded separately, so that +v and −v cancel exactly.
            self.stream.add(at, factor[:, None] * vectors)
            return
        made = self._replaced(op, at, which, words, (factor, gate))
        self.stream.replace(at, made, self._device.chosen(words))

    def _writes(self, at: Rows, words: Ints) -> NDArray[np.integer]:
        """Return the unit of the bank at which the write vector of each row begins."""
        by_position = (words[:, layout.FLAGS] & _ROW_BY_POSITION) != 0
        rows_before = by_position * self._words[at, layout.POSITION]
        starts: NDArray[np.integer] = words[:, layout.WRITE] + rows_before * self._device.units
        return starts

    def _replaced(
        self, op: Op, at: Rows, which: Ints, words: Ints, share: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return kept · h + f · v, [n, W]: as a change of h it would have the rounding of h."""
        base, (factor, gate) = self.stream.base[index(at)], share
        params = self._device.params[torch.from_numpy(which.astype(np.int64))]
        if op is Op.SCALE:
            return ((1 - gate) + gate * params[:, layout.A])[:, None] * base
        kept = 1 - factor
        if op is Op.RECONSTRUCT:
            kept = 1 - factor * params[:, layout.B]
            vectors = self._sae.decoded[self._rows[at]]
        else:
            vectors = self._device.vectors(self._writes(at, words))
            if op is Op.MULTIPLY:
                vectors = vectors * base
            elif op is Op.RAISE:
                vectors = vectors + self._device.above(base, which)
            elif op is Op.MAP:
                vectors = vectors + self._device.mapped(base, words[:, layout.READ])
        mixed = kept[:, None] * base + factor[:, None] * vectors
        is_all = (factor == 1) & (kept == 0)
        return torch.where(is_all[:, None], vectors, mixed)

    def _code(self, at: Rows, words: Ints) -> None:
        sae, unit = self._sae, self._device.bank.shape[1] // self._device.units
        for start in np.unique(words[:, layout.READ]):
            mine = at[words[:, layout.READ] == start]
            described = self._device.numbers[int(start) * unit :]
            made = reconstruct(self.stream.base[index(mine)], described, sae.weights)
            sae.decoded[self._rows[mine]] = made

    @property
    def _sae(self) -> SaeBuffers:
        assert self._device.sae is not None, "there are SAEs"
        return self._device.sae

    def _restore_norm(self, at: Rows, words: Ints) -> None:
        """Rescale the stream of rows `at` to the norm of h, where their mask is not zero."""
        rows = index(at)
        wanted = norm(self._seen(rows, words))
        reached = norm(self._masked(self.stream.now(rows), words))
        differs = ((reached != 0) & (reached != wanted)).numpy()
        if differs.any():
            at, words = at[differs], words[differs]
            ratio = (wanted / reached)[torch.from_numpy(differs)]
            made = self.stream.now(index(at)) * ratio[:, None]
            self.stream.make(at, made, self._device.chosen(words))

    def _measure(self, at: Rows, slots: Ints) -> None:
        """Store the doses of the edits of rows `at` that end here; slot 0: it does not."""
        for slot in np.unique(slots[slots > 0]).tolist():
            mine = at[slots == slot]
            base = self.stream.base[index(mine)]
            change = self.stream.now(index(mine)) - base
            self._device.store_doses(self._rows[mine], slot, change, base)

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
