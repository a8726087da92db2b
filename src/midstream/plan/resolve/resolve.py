"""Resolution of a plan against a model and a prompt, into a `ResolvedPlan`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

from midstream.errors import NothingSelectedError, SpecError
from midstream.ops.layout import MAX_BITS, Flags, Op, limit_of
from midstream.plan.instructions import Instruction
from midstream.plan.operation import refreshed
from midstream.plan.operations import Bias, Edit, Gate, Local, Reconstruct, Route, Steer
from midstream.plan.plan import Plan, ServerWide
from midstream.plan.positions.automaton import Automaton
from midstream.plan.positions.position_set import Where
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.prompt import Prompt
from midstream.plan.positions.ranges import Ranges
from midstream.plan.positions.row_order import check_row_order
from midstream.plan.positions.select import MAX_RANGES, PromptSelections
from midstream.plan.positions.work import check_overlaps, check_taps
from midstream.plan.probe import Probe
from midstream.plan.readouts import KINDS, Capture, ReadOut
from midstream.plan.readouts.attention import ATTENTION, layers_of, pattern_of, reduction_of
from midstream.plan.readouts.base import Context
from midstream.plan.resolve import gates
from midstream.plan.resolve.biases import bias_of, check_sampled, with_switch
from midstream.plan.resolve.row_placement import RowPlacement
from midstream.plan.resolved import (
    ResolvedBias,
    ResolvedCapture,
    ResolvedEdit,
    ResolvedFunction,
    ResolvedPlan,
    ResolvedProbe,
    SlottedPattern,
    Steps,
)
from midstream.plan.shape import ModelShape, VectorSize
from midstream.plan.tap_lookup import check_tapped, find_taps, num_taps
from midstream.sites import Tap, order
from midstream.validation import at


def resolve(
    plan: Plan | None,
    shape: ModelShape,
    prompt: Prompt,
    max_tokens: int | None,
    before: tuple[ServerWide, ...] = (),
    also: tuple[Capture, ...] = (),
) -> ResolvedPlan:
    """Resolve a plan for one model and prompt. Server-wide edits in `before` apply first; those
    that select nothing are skipped, as such captures in `also`. `max_tokens` None: unknown.
    """
    return _Resolver(shape, prompt, max_tokens).resolve(plan or Plan(), before, also)


class _Resolver:
    """Resolves one plan; adds the probes that its gates read."""

    def __init__(self, shape: ModelShape, prompt: Prompt, max_tokens: int | None) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise SpecError("max_tokens", f"expected at least 1, got {max_tokens}")
        self._shape = shape
        self._prompt = prompt
        self._free_ranges = MAX_RANGES
        self._selections = PromptSelections(prompt, max_tokens)
        self._context = Context(shape, self._selections, self._select)
        self._rows = RowPlacement(prompt, max_tokens)
        self._probes: list[ResolvedProbe] = []
        self._names: set[str] = set()  # of the plan's probes, and of server-wide ones
        self._biases: list[ResolvedBias] = []
        self._functions: list[ResolvedFunction] = []
        self._slots = 0
        # Score slots read by gates; gates that read the same score share its slot.
        self._gate_slots: dict[tuple[Tap, Instruction, Where], int] = {}

    def resolve(
        self, plan: Plan, before: tuple[ServerWide, ...], also: tuple[Capture, ...]
    ) -> ResolvedPlan:
        check_taps(_num_taps(plan, (*before, *also), self._shape.num_layers))
        captures: list[ResolvedCapture] = []
        for index, capture in enumerate(plan.captures):
            with at(f"capture[{index}]"):
                captures += self._resolve_capture(capture, index)
        by_kind: dict[type[ReadOut], list[ResolvedCapture]] = {}
        for resolved_capture in captures:
            readout = KINDS.get(resolved_capture.kind, Capture)
            by_kind.setdefault(readout, []).append(resolved_capture)
        for readout, mine in by_kind.items():
            readout.check_together(mine)
        for index, capture in enumerate(also, -len(also)):
            with at(f"sinks[{index}]"), suppress(NothingSelectedError):
                captures += self._resolve_capture(capture, index)
        for index, probe in enumerate(plan.probes):
            with at(f"probes[{index}]"):
                self._check_order(probe.positions)
                self._add_probe(probe, index)
        edits: list[ResolvedEdit] = []
        for index, edit in enumerate(before):
            with at(f"steering[{index}]"), suppress(NothingSelectedError):
                if isinstance(edit, Probe):
                    self._add_probe(edit, index - len(before))
                    continue
                where = self._select(edit.positions)
                edits.extend(self._resolve_edit(edit, index - len(before), where))
        own: dict[int, list[ResolvedEdit]] = {}
        for index in _memory_first(plan.edits):
            origin = plan.origin(index)
            with at(f"edits[{origin}]"):
                own[index] = self._resolve_edit(plan.edits[index], origin)
        resolved = ResolvedPlan(
            self._prompt.length,
            (*edits, *(resolved_edit for index in sorted(own) for resolved_edit in own[index])),
            tuple(captures),
            tuple(self._probes),
            biases=tuple(self._biases),
            functions=tuple(self._functions),
            followed=_followed(self._selections, plan.marked),
        )
        check_overlaps(weighed(resolved), 1 + len(plan.switches))
        if len(resolved.automata) > MAX_BITS:
            raise SpecError(
                "edits",
                f"the edits have {len(resolved.automata)} selections with marks (Between), and a "
                f"request can have {MAX_BITS}; use fewer",
            )
        return resolved

    def _check_order(self, positions: Positions) -> None:
        """Check the order of positions of which each has a row."""
        if len(positions.include) > 1:
            check_row_order(positions, self._prompt.length)

    def _select(self, positions: Positions) -> Where:
        where = self._selections.select(positions)
        if where.num_ranges > self._free_ranges:
            raise SpecError(
                "positions",
                f"the plan selects more than {MAX_RANGES} separate ranges of positions; use steps "
                "of 1",
            )
        self._free_ranges -= where.num_ranges
        return where

    def _resolve_capture(self, readout: ReadOut, source: int) -> list[ResolvedCapture]:
        if source >= 0 and readout.returns_each:
            with readout.named_positions():
                self._check_order(readout.positions)
        return readout.resolve(source, self._context)

    def _add_probe(self, probe: Probe, source: int) -> None:
        if probe.name in self._names:
            raise SpecError("name", f"a probe of the request is named `{probe.name}` as well")
        *parts, last = self._resolve_probe(probe)
        self._probes += [replace(part, source=source, part_of=probe.name) for part in parts]
        act = probe.act
        outputs: tuple[str, ...] = ()
        if probe.classes is not None:
            outputs = probe.classes.names
            if act is not None:
                act = act.at_output(probe.classes.index_of)
        named = replace(last, name=probe.name, act=act, source=source)
        self._probes.append(replace(named, rule=probe.rule, outputs=outputs))
        self._names.add(probe.name)

    def _resolve_probe(self, probe: Probe) -> list[ResolvedProbe]:
        """Return one probe without a name for each layer, in the order of a forward pass."""
        where = self._select(probe.positions)
        if probe.attention is not None:
            layers = layers_of(probe.layers, self._shape, "layer")
            with at("attention"):
                reduced = reduction_of(probe.attention, where, self._selections)
            pattern = pattern_of(layers, probe.heads, reduced, self._shape, ("layer", "head"))
            num_heads = self._shape.num_heads(pattern.reads[0])
            slotted = SlottedPattern(self._new_slot(), pattern, num_heads)
            return [ResolvedProbe("", ATTENTION, layers[0], Steps(()), where, slotted)]
        taps = find_taps(probe.layers, probe.sites, self._shape, "layer", "site")
        # Those of its numbers follow each other; the last is that of the probe.
        slot = [self._new_slot() for _ in range(probe.rule.columns)][-1]
        probes: list[ResolvedProbe] = []
        for tap in taps:
            steps = probe.steps(self._shape.size(tap))
            if isinstance(probe.direction, tuple):
                steps = (steps[gates.place_of(self._shape, tap, probe.layers)],)
            probes.append(ResolvedProbe("", *tap, _scored(steps, slot, bool(probes)), where))
        return probes

    def _resolve_edit(
        self, edit: Edit, source: int, where: Where | None = None
    ) -> list[ResolvedEdit]:
        # A gate's location is in the inner edit.
        with at("edit") if isinstance(edit, Gate) else nullcontext():
            taps = find_taps(edit.layers, edit.sites, self._shape, "layer", "site")
            where = where or self._select(edit.positions)
        if isinstance(edit, Local):
            self._functions += _functions_of(edit, taps, where, source)
        bias = bias_of(edit) if isinstance(edit, (Bias, Gate)) else None
        if bias is not None:
            check_sampled(where, self._prompt.length)
        reads: list[Tap | None] = [None]
        if isinstance(edit, Gate):
            reads = gates.gate_taps(self._shape, edit)
        *before, read = reads
        slot, placed = None, False
        if isinstance(edit, Gate) and read is not None:
            slot = self._earlier_parts(edit, before, where)
        resolved = []
        for size, mine in self._by_size(taps):
            if isinstance(edit, Gate) and read is not None:
                instructions = edit.steps(
                    size, self._shape.size(read), gates.row_of(self._shape, edit, read)
                )
            else:
                instructions = edit.steps(size)
            if bias is not None:
                instructions = with_switch(instructions, len(self._biases), size)
                self._biases.append(ResolvedBias(*map(tuple, zip(*bias.tokens, strict=True))))
            _check_reach(self._shape, edit, instructions)
            with at("edit") if isinstance(edit, Gate) else nullcontext():
                parts = [(instructions, where)]
                if max(len(step.write) for step in instructions) > 1:
                    parts = self._rows.place(instructions, edit.positions, where)
            if isinstance(edit, Gate) and edit.memory:
                gates.check_order(taps, read)
            elif read is not None and not placed:
                slot, placed = self._gate_slot(read, taps, instructions[0], where, slot), True
            for steps, part in parts:
                if isinstance(edit, Gate) and edit.memory:
                    shared = self._scanned_steps(edit, steps, mine, read, where)
                elif read is None:
                    shared = [Steps(steps)] * len(mine)
                else:
                    shared = gates.gated_steps(steps, mine, read, slot, bool(before))
                resolved += [
                    ResolvedEdit(*tap, own, part, source)
                    for tap, own in zip(mine, shared, strict=True)
                ]
        return [*_reads_elsewhere(edit, taps, where, source, self._shape), *resolved]

    def _by_size(self, taps: tuple[Tap, ...]) -> list[tuple[VectorSize, tuple[Tap, ...]]]:
        shape = self._shape
        if not (shape.widths or shape.heads or shape.routing):
            return [(shape.size(taps[0]), taps)]
        taps_by_size: dict[tuple[int, int, int | str], list[Tap]] = {}
        for tap in taps:
            size = shape.size(tap)
            taps_by_size.setdefault((size, size.heads, size.routing), []).append(tap)
        return [(shape.size(mine[0]), tuple(mine)) for mine in taps_by_size.values()]

    def _earlier_parts(self, edit: Gate, taps: list[Tap | None], where: Where) -> int | None:
        """Let a gate's score be added up in the layers before the last; return its slot, if any."""
        slot = self._new_slot() if taps else None
        for index, tap in enumerate(taps):
            assert tap is not None
            assert slot is not None
            with at("probe"):
                row = edit.probe.vector(self._shape.size(tap), gates.row_of(self._shape, edit, tap))
            probe = Instruction(Op.PROBE, row, flags=Flags.FRESH)
            self._probes.append(ResolvedProbe("", *tap, _scored((probe,), slot, index > 0), where))
        return slot

    def _gate_slot(
        self, tap: Tap, taps: tuple[Tap, ...], gate: Instruction, where: Where, slot: int | None
    ) -> int | None:
        """Return the slot of a gate's score, `slot` for parts in layers before; None: it reads at
        `tap` only.
        """
        gates.check_order(taps, tap)
        if taps == (tap,):
            return slot
        if tap in taps:
            # The edit stores the score itself, before it changes the vector.
            return self._new_slot() if slot is None else slot
        probe = Instruction(Op.PROBE, gate.read, a=gate.a, flags=Flags.FRESH | Flags.COUNTED)
        if slot is None:
            return self._shared_slot(tap, probe, where)
        self._probes.append(ResolvedProbe("", *tap, _scored((probe,), slot, True), where))
        return slot

    def _shared_slot(self, tap: Tap, probe: Instruction, where: Where) -> int:
        """Return the slot of what gates read at a tap, a PROBE or a SCAN without one."""
        # Gates that differ in threshold or sharpness alone share the score of a PROBE.
        key = (tap, probe, where)
        slot = self._gate_slots.get(key)
        if slot is None:
            slot = self._gate_slots[key] = self._new_slot()
            self._probes.append(ResolvedProbe("", *tap, Steps((replace(probe, slot=slot),)), where))
        return slot

    def _scanned_steps(
        self,
        edit: Gate,
        steps: tuple[Instruction, ...],
        taps: tuple[Tap, ...],
        read: Tap | None,
        where: Where,
    ) -> list[Steps]:
        """Return the edit of a gate with memory at each tap; it reads a SCAN at `read`, or each."""
        scan, rest = edit.memory.scan(steps[0]), refreshed(list(steps[1:]))
        slots = [self._shared_slot(read or tap, scan, where) for tap in taps]
        return [Steps((edit.memory.gate(steps[0], slot), *rest)) for slot in slots]

    def _new_slot(self) -> int:
        self._slots += 1
        return self._slots - 1


def _followed(selections: Any, marked: tuple[Positions, ...]) -> tuple[Automaton, ...]:
    """Return what looks for the marks of every version, as each of them does."""
    automata: dict[Automaton, None] = {}
    for positions in marked:
        with suppress(SpecError):  # which the version with these positions raises
            where = selections.select(positions)
            automata.update(dict.fromkeys(where.automata))
    return tuple(automata)


def _num_taps(plan: Plan, others: Sequence[Any], num_layers: int) -> int:
    """Return the number of taps of a plan with the versions that its probes switch to."""

    def taps(parts: Sequence[Any]) -> int:
        return sum(num_taps(part.layers, part.sites, num_layers) for part in parts)

    shared = taps((*plan.captures, *plan.probes, *others))
    versions = [plan.edits, *(switch.edits for switch in plan.switches)]
    return sum(shared + taps(edits) for edits in versions)


def weighed(plan: ResolvedPlan) -> list[tuple[Ranges, int]]:
    """Return the positions of each part of a plan, and its weight; see `check_overlaps`."""
    edits_and_probes: tuple[ResolvedEdit | ResolvedProbe, ...] = (*plan.edits, *plan.probes)
    parts = [
        (part.where.possible, 1 + sum(len(match.ids) for match in part.where.matches))
        for part in edits_and_probes
    ]
    # A combination costs as much for one edit as for some 16 captured taps.
    return parts + [
        (capture.where.possible, 1 + len(capture.taps) // 16) for capture in plan.captures
    ]


def _memory_first(edits: Sequence[Edit]) -> list[int]:
    """Return the indices of edits, gates with memory first: their columns stay the same."""
    remembers = [isinstance(edit, Gate) and bool(edit.memory) for edit in edits]
    return sorted(range(len(edits)), key=lambda index: not remembers[index])


def _check_reach(shape: ModelShape, edit: Edit, instructions: tuple[Instruction, ...]) -> None:
    """Check that the edit of a vector of usual length stays within the stream's range."""
    if isinstance(edit.edit if isinstance(edit, Gate) else edit, Route):
        return  # No layer squares logits, and a Route bounds what it makes of them.
    limit = limit_of(shape.dtype)
    reach = max(step.reach for step in instructions)
    if reach > limit:
        raise SpecError(
            "scale" if isinstance(edit, Steer) else "",
            f"the edit adds a vector of length {reach:.3g}; the limit for "
            f"{shape.dtype} is {limit:.3g}, beyond which the model's layers overflow: "
            "use a smaller scale or shorter vectors",
        )


def _scored(steps: tuple[Instruction, ...], slot: int, adds: bool) -> Steps:
    """Return the instructions of a probe that stores its numbers in the slots up to one, or adds to
    the score.
    """
    flags = Flags.COUNTED | (Flags.ADDS if adds else Flags.NONE)
    before = [
        replace(step, slot=slot - distance) if step.op is Op.PROBE else step
        for distance, step in zip(range(len(steps) - 1, 0, -1), steps, strict=False)
    ]
    return Steps((*before, replace(steps[-1].with_flags(flags), slot=slot)))


def _functions_of(
    edit: Local, taps: tuple[Tap, ...], where: Where, source: int
) -> list[ResolvedFunction]:
    if where.matches:
        raise SpecError(
            "positions",
            "a function cannot be called by what is generated: select all tokens, and read "
            "info.token_ids in it",
        )
    function = edit.function
    return [
        ResolvedFunction(*tap, function.key, function.path, function.name, where, source)
        for tap in sorted(taps, key=order)
    ]


def _reads_elsewhere(
    edit: Edit, taps: tuple[Tap, ...], where: Where, source: int, shape: ModelShape
) -> list[ResolvedEdit]:
    """Return what a transcoder does at the sites that it reads."""
    inner = edit.edit if isinstance(edit, Gate) else edit
    if not isinstance(inner, Reconstruct):
        return []
    reading = inner.reads_elsewhere(shape.hidden_size)
    if reading is None:
        return []
    site, step = reading
    for _, layer in taps:
        check_tapped((site, layer), shape, "site", "layer")
    steps = Steps((step,))
    return [ResolvedEdit(site, layer, steps, where, source) for _, layer in taps]
