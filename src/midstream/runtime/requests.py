"""The requests that ask for something, as the worker knows them: segments, and what was done.

A request's plan is cut into segments of positions: within one, every token has the same program
(edits and probes) and the same group (captures). A request that asks for nothing is not here.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.ops import layout
from midstream.runtime.buffers import Tap
from midstream.runtime.edits import Edit
from midstream.runtime.ledger import Block, Ledger, Scores, Stored
from midstream.runtime.programs import Edits, Tables
from midstream.spec import ResolvedPlan
from midstream.spec.range_algebra import overlay
from midstream.spec.ranges import Ranges

FOREVER = np.iinfo(np.int64).max // 2

# States of a position in `Request.done`: no row of it asked for anything; it was never computed,
# as the prefix cache served it; from APPLIED_0 on, computed with that many edits.
UNSEEN = 0
CACHED = 1
APPLIED_0 = 2
MOST_APPLIED = 0xFFFF


T = TypeVar("T")


class Share(NamedTuple):
    """Which part of what is captured leaves through one rank of a tensor-parallel group.

    Attributes:
        rank: its number in the group.
        ranks: how many there are.
    """

    rank: int
    ranks: int

    def of(self, taps: tuple[T, ...], sharded: bool) -> tuple[T, ...]:
        """The rank's of some taps that are captured together."""
        if sharded:
            # What it is depends on these taps alone: alike for all who capture them.
            return taps[self.rank :: self.ranks]
        return () if self.rank else taps


WHOLE = Share(0, 1)


class Piece(NamedTuple):
    """Positions [start, stop) that all ask for the same; it has no program yet.

    Attributes:
        edits: edits, then probes.
        taps: captured.
        scored: whether a score there goes to the caller.
    """

    start: int
    stop: int
    edits: Edits
    taps: tuple[int, ...]
    scored: bool


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
class Request:
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
    blocks: list[Block[Stored]] = field(default_factory=list)
    scores: list[Block[Scores]] = field(default_factory=list)
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


@dataclass(frozen=True, slots=True)
class _Part:
    """Something asked for at some positions."""

    ranges: Ranges
    edit: Edit | None = None
    taps: tuple[int, ...] = ()
    scored: bool = False


def cut(plan: ResolvedPlan, taps: dict[Tap, int], share: Share) -> list[Piece]:
    """A plan as pieces over [0, FOREVER), for the taps of this rank.

    Args:
        plan: what the request asks for.
        taps: this rank's taps and their indices.
        share: which part of its vectors leaves through this rank.
    """
    parts = _parts(plan, taps, share)
    pieces = []
    for start, stop, indices in overlay([part.ranges for part in parts]):
        here = [parts[nth] for nth in indices]
        edits = tuple(part.edit for part in here if part.edit is not None)
        places = tuple(sorted({tap for part in here for tap in part.taps}))
        scored = any(part.scored for part in here)
        end = FOREVER if stop is None else stop
        pieces.append(Piece(start, end, edits, share.of(places, plan.sharded), scored))
    return pieces


def _parts(plan: ResolvedPlan, taps: dict[Tap, int], share: Share) -> list[_Part]:
    """What is asked for at these taps, in the order in which it applies at each."""
    parts = []
    for edit in plan.edits:
        index = taps.get((edit.site, edit.layer))
        if index is not None:
            instructions, digest = edit.steps.instructions, edit.steps.digest
            if edit.where.ranges:
                parts.append(_Part(edit.where.ranges, Edit(index, instructions, digest)))
            for match in edit.where.matches:
                only = Edit(index, instructions, digest, match.ids, match.others)
                parts.append(_Part(match.ranges, only))
    for probe in plan.probes:
        index = taps.get((probe.site, probe.layer))
        if index is not None:
            read = Edit(index, probe.steps.instructions, probe.steps.digest)
            # Scores are few: the first rank has them all.
            scored = share.rank == 0 and bool(probe.name)
            # Of a probe's scores the front end keeps those that are asked for.
            parts.append(_Part(probe.where.possible, read, scored=scored))
    for capture in plan.captures:
        places = tuple(taps[tap] for tap in capture.taps if tap in taps)
        if places:
            parts.append(_Part(capture.where.possible, taps=places))
    return parts


def acquire_segments(
    pieces: list[Piece], tables: Tables, ledger: Ledger[Any], codec: int = 0
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


def release_segments(segments: list[Segment], tables: Tables) -> None:
    """Ends the use of the segments' programs and groups."""
    for segment in segments:
        if segment.program != layout.IDLE_PROGRAM:
            tables.release_program(segment.edits)
            tables.release_group(segment.taps)
