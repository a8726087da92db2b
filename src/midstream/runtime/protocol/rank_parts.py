"""Taps whose vectors a tensor-parallel group's ranks have in parts: heads and neurons. The front
end joins captures, and rejects edits that need several parts for one result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan import ResolvedPlan, ResolvedProbe
from midstream.plan.instructions import Instruction
from midstream.plan.vectors.vector import Vector
from midstream.results.encoded_rows import Scattered
from midstream.runtime.protocol.results import ResultBlock, WorkerResult
from midstream.runtime.protocol.runs import Floats, Ints
from midstream.runtime.protocol.worker_info import WorkerInfo
from midstream.sites import Tap
from midstream.validation import at

# A column of scores of which the ranks have parts, and the number of parts.
SplitScore = tuple[int, int]

_READING = (Op.CLIP, Op.LINEAR, Op.FEATURE)


def check_parts(plan: ResolvedPlan, parts: Mapping[Tap, int]) -> None:
    """Check that each rank can carry out its part of a plan; `parts`: number by split tap."""
    if plan.codec != "raw":
        for tap in plan.taps:
            if tap in parts:
                raise SpecError(
                    "capture",
                    f"{tap[0]} is split over {parts[tap]} ranks, so its vectors cannot be encoded "
                    f'by {plan.codec}; use codec="raw"',
                )
    for probe in plan.probes:
        # Parts of scores that are returned are added up in the front end.
        if probe.attention is not None or probe.tap not in parts:
            continue
        if not probe.name and not probe.part_of:
            raise _needs_all(probe.site, "a gate that reads it").under("edits")
        if any(step.op is Op.UNIT for step in probe.steps.instructions):
            raise SpecError(
                f"probes[{probe.source}].mlp" if probe.source >= 0 else f"steering[{probe.source}]",
                f"{probe.site} is split over {parts[probe.tap]} ranks, and a hidden unit needs all "
                "of it; read a site of the residual stream, or use tensor_parallel_size=1",
            )
    for function in plan.functions:
        if (function.site, function.layer) in parts:
            raise _needs_all(function.site, "a function").under(f"edits[{function.source}]")
    for edit in plan.edits:
        count = parts.get((edit.site, edit.layer))
        if count is not None and any(step.op is Op.MAP for step in edit.steps.instructions):
            raise SpecError(
                f"edits[{edit.source}].matrix",
                f"{edit.site} is split over {count} ranks, and a matrix needs all of its vectors; "
                "use tensor_parallel_size=1",
            )
        if count is not None and not all(_is_local(s, count) for s in edit.steps.instructions):
            with at(f"edits[{edit.source}]"):
                raise _needs_all(edit.site, "an edit that reads or rescales the whole vector")


def _needs_all(site: str, what: str) -> SpecError:
    return SpecError(
        "",
        f"{site} is split over the ranks under tensor parallelism, and {what} needs all of it; "
        "give head=, so that it needs one head, or use tensor_parallel_size=1",
    )


def _is_local(step: Instruction, parts: int) -> bool:
    if step.op in (Op.PROBE, Op.UNIT, Op.RAISE, Op.MAP) or (
        step.op is Op.GATE and step.read is not None
    ):
        return False
    read: set[int] = set()
    if step.op in _READING and step.read is not None:
        read = _parts_of(step.read, parts)
    elif step.op is Op.ADD_MATCHED or Flags.KEEP in step.flags:
        read = set(range(parts)) if step.mask is None else _parts_of(step.mask, parts)
    if not read and step.op not in _READING:
        return True
    written = [step.mask] if step.op is Op.SCALE else list(step.write)
    touched = {
        part for vector in written if vector is not None for part in _parts_of(vector, parts)
    }
    return len(read | touched) <= 1


def _parts_of(vector: Vector, parts: int) -> set[int]:
    size = vector.size // parts
    return set((np.flatnonzero(vector.numpy()) // size).tolist())


def part_of_steps(steps: tuple[Instruction, ...], part: int, parts: int) -> tuple[Instruction, ...]:
    """Return the instructions of one part of the vectors, of those that `check_parts` accepts."""

    def cut(vector: Vector) -> Vector:
        nbytes = len(vector.data) // parts
        return Vector(vector.data[part * nbytes : (part + 1) * nbytes])

    return tuple(
        replace(
            step,
            read=None if step.read is None else cut(step.read),
            # The parts of a score are added up: one of them has the bias.
            a=0.0 if step.op is Op.PROBE and part else step.a,
            write=tuple(cut(vector) for vector in step.write),
            mask=None if step.mask is None else cut(step.mask),
        )
        for step in steps
    )


def joined_blocks(results: Iterable[WorkerResult]) -> list[ResultBlock]:
    """Return the captured rows of several workers, with all parts of each joined."""
    whole: list[ResultBlock] = []
    split: dict[Tap, dict[int, list[ResultBlock]]] = {}
    counts: dict[Tap, int] = {}
    for result in results:
        for block in result.blocks():
            parts = block.parts
            if parts == 1:
                whole.append(block)
                continue
            copies = result.worker.tensor_ranks // parts
            part = result.worker.tensor_rank // copies
            for tap in block.taps:
                counts[tap] = parts
                split.setdefault(tap, {}).setdefault(part, []).append(block)
    complete = (tap for tap, of in split.items() if len(of) == counts[tap])
    joined = [_joined(tap, [split[tap][part] for part in sorted(split[tap])]) for tap in complete]
    return whole + [block for block in joined if block.positions.size]


def split_scores(plan: ResolvedPlan, parts: Mapping[Tap, int]) -> tuple[SplitScore, ...]:
    """Return the scores of a plan's named probes of which the ranks have parts."""
    counts = {
        slot: parts[probe.tap]
        for probe in plan.probes
        if probe.name and probe.tap in parts
        for slot in probe.slots
    }
    return tuple(counts.items())


def probe_numbers(
    probe: ResolvedProbe, sent: Iterable[tuple[WorkerInfo, Ints, Floats]]
) -> list[tuple[Ints, Floats]]:
    """Return a probe's (positions, numbers float32 [positions, columns]), with the parts of several
    ranks added up.
    """
    tap, slots = probe.tap, probe.slots
    by_rank: dict[int, list[tuple[Ints, Floats]]] = {}
    needed = 1
    for worker, positions, values in sent:
        if tap not in worker.taps:
            continue
        parts = worker.parts[worker.taps.index(tap)]
        has_own_part = parts > 1 and worker.tensor_rank % (worker.tensor_ranks // parts) == 0
        if has_own_part or worker.tensor_rank == 0:
            needed = parts
            column = positions, values[:, slots.start : slots.stop]
            by_rank.setdefault(worker.tensor_rank, []).append(column)
    if needed == 1:
        return [column for columns in by_rank.values() for column in columns]
    if len(by_rank) < needed:
        return []
    first, *others = (_in_order(columns) for columns in by_rank.values())
    positions, total = first
    for known, values in others:
        positions, mine, theirs = np.intersect1d(
            positions, known, assume_unique=True, return_indices=True
        )
        total = total[mine] + values[theirs]
    return [(positions, total)]


def _in_order(blocks: Sequence[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
    positions = np.concatenate([known for known, _ in blocks])
    order = np.argsort(positions, kind="stable")
    return positions[order], np.concatenate([values for _, values in blocks])[order]


def _joined(tap: Tap, parts: Sequence[Sequence[ResultBlock]]) -> ResultBlock:
    pieces = [_rows_of(tap, blocks) for blocks in parts]
    positions = pieces[0][0]
    for others, _ in pieces[1:]:
        positions = np.intersect1d(positions, others, assume_unique=True)
    rows = [values[torch.from_numpy(np.searchsorted(known, positions))] for known, values in pieces]
    first = parts[0][0]
    return ResultBlock([tap], first.codec, positions, [torch.cat(rows, 1)[:, None]], first.rank)


def _rows_of(tap: Tap, blocks: Sequence[ResultBlock]) -> tuple[Ints, torch.Tensor]:
    """Return the positions of one part of a tap's rows, ascending, and the rows [n, bytes]."""
    rows = []
    for block in blocks:
        place = block.taps.index(tap)
        for chunk in block.chunks:
            rows.append(chunk.of(place) if isinstance(chunk, Scattered) else chunk[:, place])
    positions = np.concatenate([block.positions for block in blocks])
    order = np.argsort(positions, kind="stable")
    return positions[order], torch.cat(rows)[torch.from_numpy(order)]
