"""What the `site` op must leave behind, row by row, in plain Python."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from support.site_cases import Case

_READERS = (Op.CLIP, Op.LINEAR, Op.FEATURE, Op.GATE, Op.PROBE, Op.UNIT)
_ACTIVATIONS = (
    lambda x: max(x, 0.0),
    lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    math.tanh,
    lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0,
)


def expected(case: Case) -> Case:
    """What the op must leave behind, written as one reads `midstream.ops.layout`."""
    out = case.copy()
    dtype = out.hidden.dtype
    zero = torch.zeros(out.hidden.shape[1], dtype=dtype)
    for row in range(out.hidden.shape[0]):
        program, group, record, _ = out.tokens[row].tolist()
        if program == 0:
            continue
        rest = zero if out.residual is None else out.residual[row]
        start, count, _, _ = out.table[program].tolist()
        run = _Run(out, row, out.hidden[row].float() + rest.float())
        for number in range(start, start + count):
            run.step(out.instructions[number].tolist(), out.params[number].tolist())
        beyond = _write(out, row, run) if count else False
        spoiled = run.spoiled or bool(count and (beyond or _nonfinite(out.hidden[row])))
        place = int(out.table[group, layout.PLACE])
        first = int(out.table[0, layout.FIRST])
        captured = record > 0 and place > 0 and first >= 0
        if captured:
            stream = out.hidden[row].float() + rest.float()
            target = first + (record - 1) + (place - 1)
            out.ring[target] = stream.to(out.ring.dtype)
            spoiled = spoiled or _nonfinite(out.ring[target])
        summed = int(out.tally[row, layout.SIGNATURE]) + int(out.table[0, layout.CODE])
        out.tally[row, layout.SIGNATURE] = (summed + 2**31) % 2**32 - 2**31
        out.tally[row, layout.EDITS] += run.done
        out.tally[row, layout.CAPTURES] += int(captured)
        if spoiled:
            out.tally[row, layout.NONFINITE] = 1
    return out


def _write(out: Case, row: int, run: _Run) -> bool:
    """Round the row that a program made to the tensors of the stream, as a high and a low part if
    there are two. Components that are as they were keep their bits. Return whether some saturated.
    """
    halves = [out.hidden] if out.residual is None else [out.residual, out.hidden]
    entered, limit = run.entered.abs(), layout.limit_of(str(halves[0].dtype).removeprefix("torch."))
    is_larger = (entered > limit) & (entered <= 65504) & (halves[0].dtype == torch.float16)
    bound = torch.where(is_larger, entered, limit).double()
    made = run.made([half[row] for half in halves])
    beyond = run.changed & ~(made.abs() <= bound)
    made = torch.where(beyond, made.nan_to_num(0.0).clamp(-bound, bound), made)
    for half in halves:
        part = made.to(half.dtype)
        half[row] = torch.where(run.changed, part, half[row])
        made = made - part.double()
    return bool(beyond.any())


def _nonfinite(row: Tensor) -> bool:
    return not bool(row.isfinite().all())


class _Run:
    """One row's program, an instruction at a time; sums in double precision."""

    def __init__(self, case: Case, row: int, entered: Tensor) -> None:
        self.case, self.row, self.entered = case, row, entered
        self.base = entered
        # Of each component: what is added to the stream on entry, and whether that was replaced.
        self.delta = torch.zeros_like(entered)
        self.is_new = False
        self.gate = 1.0
        self.units = 0.0
        self.done = 0
        self.spoiled = False

    @property
    def now(self) -> Tensor:
        """The stream, float32."""
        return self.delta if self.is_new else self.entered + self.delta

    @property
    def changed(self) -> Tensor:
        """Which components are not as they were."""
        if not self.is_new:
            return self.delta != 0
        return ~((self.delta == self.entered) | (self.delta.isnan() & self.entered.isnan()))

    def made(self, halves: list[Tensor]) -> Tensor:
        """The row that the program made of the stream's halves, the last of which is added to in
        float32, in double precision.
        """
        if self.is_new:
            return self.delta.double()
        *rest, half = halves
        return sum((each.double() for each in rest), (half.float() + self.delta).double())

    def step(self, word: list[int], params: list[float]) -> None:
        op, read, write, slot, bits, ids_start, ids_count, mask = word
        a, b, c, d = params
        flags = Flags(bits)
        if ids_count:
            token, selected = self.case.ids[self.row].tolist()
            if ids_count == layout.BY_BIT:
                applies = bool(selected & 2**ids_start)
            else:
                applies = token in self.case.lists[ids_start : ids_start + ids_count].tolist()
            if applies == (Flags.OTHER_IDS in flags):
                return
        if Flags.COUNTED in flags:
            self.done += 1
        if Flags.FRESH in flags:
            self.base = self.now
        if Flags.ROW_BY_POSITION in flags:
            write += int(self.case.tokens[self.row, layout.POSITION])
        bank = self.case.bank
        chosen = bank[mask - 1] != 0 if mask else torch.ones_like(self.base) != 0
        seen = torch.where(chosen, self.base, 0.0)
        x = float(seen.double() @ bank[read].double()) if op in _READERS else 0.0
        if op == Op.UNIT:
            self.units += b * _ACTIVATIONS[int(c)](x + a)
            return
        if op == Op.PROBE and Flags.UNITS in flags:
            x, self.units = self.units, 0.0
        stored = float(self.case.scores[self.row, slot - 1])
        if op == Op.GATE:
            read = 0.0 if slot and Flags.ADDS not in flags else x + a
            self.set_gate(read + stored if slot else read, b, c)
            if Flags.STEP in flags:
                self.gate = float(self.seen > b)
            return
        if op == Op.PROBE:
            self.case.scores[self.row, slot - 1] = x + a + (stored if Flags.ADDS in flags else 0.0)
            self.spoiled |= not math.isfinite(self.case.scores[self.row, slot - 1])
            return
        active = x + a if x + a > b else 0.0
        factor = {
            Op.ADD: a,
            Op.ADD_MATCHED: a * float(seen.double().norm()),
            Op.CLIP: c * (min(max(x, a), b) - x),
            Op.LINEAR: a * (x + b),
            Op.FEATURE: c * active + d,
            Op.REPLACE: a,
            Op.SCALE: a - 1,
            Op.MULTIPLY: a,
            Op.RAISE: a,
            Op.MAP: a,
        }[Op(op)]
        gate = self.gate if Flags.GATED in flags else 1.0
        factor = factor * gate if gate else 0.0
        if factor:
            change = self.replace if op >= Op.REPLACE else self.add
            change(Op(op), bank[write], chosen, factor, (read, a, b, gate))
        if Flags.KEEP in flags:
            self.keep(chosen)

    def add(self, op: Op, vector: Tensor, chosen: Tensor, factor: float, _: Any) -> None:
        vector = torch.where(chosen, vector, 0.0)
        self.delta = self.delta + torch.tensor(factor, dtype=torch.float32) * vector

    def replace(self, op: Op, vector: Tensor, chosen: Tensor, factor: float, known: Any) -> None:
        """kept · h + f · v, where the mask is; other edits of h since then are added."""
        (read, a, b, gate), h, v = known, self.base.double(), vector.double()
        if op == Op.MULTIPLY:
            v = v * h
        if op == Op.RAISE:
            v = v + h.max() + b * h.max().abs().clamp_min(1)
        if op == Op.MAP:
            v = v + self.case.bank[read : read + len(v)].double() @ h
        made = v if factor == 1 else (1 - factor) * h + factor * v
        if op == Op.SCALE:
            made = (1 - gate + gate * a) * h
        since = (self.now.double() - h) if not torch.equal(self.now, self.base) else 0.0
        self.delta = torch.where(chosen, (made + since).float(), self.now)
        self.is_new = True

    def set_gate(self, x: float, b: float, c: float) -> None:
        self.seen = x
        power = -c * (x - b)
        self.gate = 1 / (1 + math.exp(power)) if power < 700 else 0.0

    def keep(self, chosen: Tensor) -> None:
        after, before = self.now[chosen], self.base[chosen]
        if torch.equal(after, before) or not after.any():
            return
        ratio = float(before.double().norm() / after.double().norm())
        self.delta = torch.where(chosen, self.now * ratio, self.now)
        self.is_new = True
