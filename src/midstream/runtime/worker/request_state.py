"""The requests that ask for something, as the worker knows them: segments, and what was done.

A request's plan is cut into segments of positions: within one, every token has the same program
(edits and probes) and the same group (captures). A request that asks for nothing is not here.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.ops import layout
from midstream.runtime.protocol.segments import FOREVER, Edits, PlanSegment
from midstream.runtime.worker.row_index import ArenaRows, CapturedRowIndex, RowBlock, Scores
from midstream.runtime.worker.tables.program_table import ProgramTable
from midstream.spec import ResolvedPlan

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions [start, stop) of a request, and what each token there gets."""

    start: int
    stop: int
    edits: Edits
    taps: tuple[int, ...]  # taps captured, as indices on this rank
    program: int
    group: int
    kind: int  # what the ledger calls records of these taps
    scored: bool = False  # whether a score goes to the caller
    codec: int = 0  # how its vectors leave


@dataclass(slots=True)
class RequestState:
    """One request that asks for something.

    Attributes:
        slot: its row in the planner's arrays.
        serial: its number, which no other request of this worker ever has.
        done: uint16 [max_model_len], the state of each position.
        blocks: what was captured; filled in when the request is taken.
        scores: what its probes read; likewise.
        problem: the first thing that went wrong, if any.
        dropped: how many of its vectors found no room in the arena.
        prompt: what its prompt has grown to, where it came more than once: the inputs of a session,
            and what was generated between them.
        turns: how long that was each time that it came, but for the first.
        handed: the position below which its rows have been handed over while it ran.
        oldest: the number that the ledger has for a step before which it has no rows of this.
    """

    id: str
    uid: str
    plan: ResolvedPlan
    slot: int
    segments: list[Segment]
    serial: int = 0
    blocks: list[RowBlock[ArenaRows]] = field(default_factory=list)
    scores: list[RowBlock[Scores]] = field(default_factory=list)
    problem: str = ""
    dropped: int = 0
    prompt: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    handed: int = 0
    oldest: int = 0
    done: NDArray[np.uint16] = field(default_factory=lambda: np.zeros(0, np.uint16))

    def segments_within(self, start: int, stop: int) -> list[Segment]:
        """The segments that positions [start, stop) touch."""
        first = bisect.bisect_right(self.segments, start, key=lambda segment: segment.start) - 1
        last = bisect.bisect_left(self.segments, stop, key=lambda segment: segment.start)
        return self.segments[first:last]

    def num_scored(self, start: int, stop: int) -> int:
        """How many of the positions [start, stop) have a score that goes to the caller."""
        return sum(
            max(0, min(stop, segment.stop) - max(start, segment.start))
            for segment in self.segments_within(start, stop)
            if segment.scored
        )


def idle_segment(start: int = 0, stop: int = FOREVER) -> Segment:
    """Positions at which nothing is asked for."""
    return Segment(start, stop, (), (), layout.IDLE_PROGRAM, layout.NO_GROUP, 0)


def acquire_segments(
    pieces: list[PlanSegment], tables: ProgramTable, ledger: CapturedRowIndex[Any], codec: int = 0
) -> list[Segment]:
    """The segments with their programs and groups; all or nothing.

    Args:
        pieces: what is asked for where.
        tables: the rank's.
        ledger: that of captured rows.
        codec: the number of how they leave.

    Raises:
        SpecError: there is no room.
    """
    segments: list[Segment] = []
    try:
        for start, stop, edits, taps, scored in pieces:
            if not edits and not taps:
                segments.append(idle_segment(start, stop))
                continue
            program = tables.acquire_program(edits)
            try:
                group = tables.acquire_group(taps)
            except SpecError:
                tables.release_program(edits)
                raise
            kind = ledger.kind(taps, codec)
            encoded = codec if taps else 0
            segments.append(
                Segment(start, stop, edits, taps, program, group, kind, scored, encoded)
            )
    except SpecError:
        release_segments(segments, tables)
        raise
    return segments


def release_segments(segments: list[Segment], tables: ProgramTable) -> None:
    """Ends the use of the segments' programs and groups."""
    for segment in segments:
        if segment.program != layout.IDLE_PROGRAM:
            tables.release_program(segment.edits)
            tables.release_group(segment.taps)
