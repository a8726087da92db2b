"""The requests that ask for something, as the worker knows them: segments, and what was done.

A request's plan is cut into segments of positions: within one, every token has the same program
(edits) and the same group (captures). A request that asks for nothing is not here.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.ops import layout
from midstream.runtime.buffers import Tap
from midstream.runtime.ledger import Block, Ledger
from midstream.runtime.programs import Edit, Tables
from midstream.spec import ResolvedPlan

FOREVER = np.iinfo(np.int64).max // 2

# (start, stop, edits, taps captured): a segment that has no program yet.
Piece = tuple[int, int, tuple[Edit, ...], tuple[int, ...]]

# States of a position in `Request.done`. From APPLIED_0 on: computed, with that many edits.
UNSEEN = 0
APPLIED_0 = 1
MOST_APPLIED = 0xFFFF


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions [start, stop) of a request, and what each token there gets."""

    start: int
    stop: int
    edits: tuple[Edit, ...]
    taps: tuple[int, ...]  # taps captured, as indices on this rank
    program: int
    group: int
    kind: int  # what the ledger calls records of these taps


@dataclass(slots=True)
class Request:
    """One request that asks for something.

    Attributes:
        slot: its row in the planner's arrays.
        serial: its number, which no other request of this worker ever has.
        done: uint16 [max_model_len], the state of each position.
        blocks: what was captured; filled in when the request is taken.
        problem: the first thing that went wrong, if any.
    """

    id: str
    uid: str
    plan: ResolvedPlan
    slot: int
    segments: list[Segment]
    serial: int = 0
    blocks: list[Block] = field(default_factory=list)
    problem: str = ""
    done: NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint16))

    def segments_within(self, start: int, stop: int) -> list[Segment]:
        """The segments that positions [start, stop) touch."""
        first = bisect.bisect_right(self.segments, start, key=lambda segment: segment.start) - 1
        last = bisect.bisect_left(self.segments, stop, key=lambda segment: segment.start)
        return self.segments[first:last]


def idle_segment(start: int = 0, stop: int = FOREVER) -> Segment:
    """Positions at which nothing is asked for."""
    return Segment(start, stop, (), (), layout.IDLE_PROGRAM, layout.NO_GROUP, 0)


def cut(plan: ResolvedPlan, taps: dict[Tap, int], captures: bool) -> list[Piece]:
    """A plan as (start, stop, edits, taps captured) over [0, FOREVER), for the taps of this rank.

    Args:
        plan: what the request asks for.
        taps: this rank's taps and their indices.
        captures: whether this rank captures (one rank of a tensor-parallel group does).
    """
    edits = [
        (edit.ranges, Edit(taps[edit.site, edit.layer], edit.vector, edit.scale))
        for edit in plan.edits
        if (edit.site, edit.layer) in taps
    ]
    captured = [
        (capture.worker_ranges, [taps[tap] for tap in capture.taps if tap in taps])
        for capture in plan.captures
        if captures
    ]
    # A sweep over the bounds: what begins and what ends at each.
    events: dict[int, list[tuple[bool, int]]] = {0: [], FOREVER: []}
    for nth, (ranges, _) in enumerate((*edits, *captured)):
        for start, stop in ranges:
            events.setdefault(start, []).append((True, nth))
            events.setdefault(FOREVER if stop is None else stop, []).append((False, nth))
    ordered = sorted(events)
    active: set[int] = set()
    pieces = []
    for start, stop in zip(ordered, ordered[1:], strict=False):
        for begins, nth in events[start]:
            (active.add if begins else active.discard)(nth)
        here = tuple(edits[nth][1] for nth in sorted(active) if nth < len(edits))
        places = {
            tap for nth in active if nth >= len(edits) for tap in captured[nth - len(edits)][1]
        }
        pieces.append((start, stop, here, tuple(sorted(places))))
    return pieces


def acquire_segments(pieces: list[Piece], tables: Tables, ledger: Ledger) -> list[Segment]:
    """The segments with their programs and groups; all or nothing.

    Raises:
        SpecError: there is no room.
    """
    segments: list[Segment] = []
    try:
        for start, stop, edits, taps in pieces:
            if not edits and not taps:
                segments.append(idle_segment(start, stop))
                continue
            program = tables.acquire_program(edits)
            try:
                group = tables.acquire_group(taps)
            except SpecError:
                tables.release_program(edits)
                raise
            segments.append(Segment(start, stop, edits, taps, program, group, ledger.kind(taps)))
    except SpecError:
        release_segments(segments, tables)
        raise
    return segments


def release_segments(segments: list[Segment], tables: Tables) -> None:
    """Ends the use of the segments' programs and groups."""
    for segment in segments:
        if segment.program != layout.IDLE_PROGRAM:
            tables.release_program(segment.edits)
            tables.release_group(segment.taps)
