"""State of one request with a plan on the worker: its segments, and what was done for it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.ops import layout
from midstream.plan import ResolvedPlan
from midstream.plan.resolved import ON_DEVICE, ResolvedBias, ResolvedFunction, path_of
from midstream.runtime.protocol.rank_parts import SplitScore
from midstream.runtime.protocol.results import DoseSums, WeightState
from midstream.runtime.protocol.segments import FOREVER, Edits, PatternRead, PlanSegment
from midstream.runtime.worker.row_block import RowBlock
from midstream.runtime.worker.row_index import ArenaRows, CapturedRowIndex, ScoreRows
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.program_table import ProgramTable

_NO_STATES = np.zeros(0, np.uint16)


class Segment(NamedTuple):
    """Positions [start, stop) of a request, and what each token there gets."""

    start: int
    stop: int
    edits: Edits
    taps: tuple[int, ...]  # captured, in the order of a record: those of one width are neighbours
    program: int  # index of the program of `edits`
    group: int  # index of the capture group of `taps`
    kind: int  # of the records of `taps`, from `CapturedRowIndex.kind`
    scored: bool = False  # scores are returned to the caller
    codec: int = 0  # number of the encoding of the captured rows
    units: int = 0  # ring units of a record of `taps`
    patterns: tuple[PatternRead, ...] = ()  # rows made of the queries in `taps`, and scores
    returned: int = 0  # rows of each token: taps but mere queries, patterns but scores

    @property
    def content(self) -> tuple[int, ...]:
        """What each token gets, as the columns `CONTENT` of segments and runs."""
        vectors = len(self.taps)
        return self.program, self.group, vectors, self.units, self.kind, self.scored, self.codec


@dataclass(slots=True, eq=False)
class FunctionUse:
    """A function of a request at one tap: its index in the plan, calls, and rows given to it."""

    index: int
    function: ResolvedFunction
    call: Callable[..., Any]
    calls: int = 0
    rows: int = 0


@dataclass(slots=True, eq=False)
class RankPlan:
    """A plan on this rank, which requests with the same plan share."""

    number: int  # from 1; no other plan gets it again
    packed: bytes  # its bytes
    resolved: ResolvedPlan
    segments: list[Segment]
    users: int = 0  # requests that use it
    has_states: bool = field(init=False)  # gates of it remember something; see `GateStates`
    has_sums: bool = field(init=False)  # it reduces rows; see `Reductions`
    leaves_rows: bool = field(init=False)  # on the device; see `DeviceRowTable`

    def __post_init__(self) -> None:
        patterns = [capture.pattern for capture in self.resolved.captures]
        self.has_states = any(probe.is_scan for probe in self.resolved.probes)
        self.has_sums = any(pattern is not None and pattern.reduces for pattern in patterns)
        kinds = {pattern.kind for pattern in patterns if pattern is not None}
        self.leaves_rows = ON_DEVICE in kinds


@dataclass(frozen=True, slots=True)
class PlacedVersion:
    """A version of a request's plan; None if it could not be read or placed."""

    number: int
    position: int
    plan: RankPlan | None


@dataclass(slots=True)
class RequestState:
    """One request with a plan."""

    id: str
    uid: str  # midstream's, the same for all completions of a prompt
    plan: ResolvedPlan
    slot: int  # row of the arrays of `SlotTable`
    segments: list[Segment]  # of the plan and of its later versions, ascending, over [0, FOREVER)
    reports: bool = False  # its scores leave with the output of each step
    split: tuple[SplitScore, ...] = ()  # columns of which ranks have parts
    shared: RankPlan | None = None  # None if the plan could not be read or placed
    later: list[PlacedVersion] = field(default_factory=list)  # versions that came while it ran
    serial: int = 0
    blocks: list[RowBlock[ArenaRows]] = field(default_factory=list)  # set when collected
    scores: list[ScoreRows] = field(default_factory=list)
    problem: str = ""  # the first; empty if there was none
    dropped: int = 0  # captured vectors that did not fit into the arena
    nonfinite: bool = False
    prompt: list[int] = field(default_factory=list)  # as grown, if new more than once
    turns: list[int] = field(default_factory=list)  # its lengths each time that it had grown
    streamed: int = 0  # position up to which its rows were delivered while it ran
    oldest_step: int = 0  # number of a step of the row index before which it has no rows
    resets: int = 0  # of the prefix cache when it began
    first_step: int = 0
    weights: list[WeightState] = field(default_factory=list)  # set when it ends
    functions: list[FunctionUse] = field(default_factory=list)
    done: NDArray[np.uint16] = field(default_factory=lambda: _NO_STATES)  # set when settled
    doses: list[DoseSums] = field(default_factory=list)  # likewise

    def segments_within(self, start: int, stop: int) -> list[Segment]:
        first = bisect.bisect_right(self.segments, start, key=lambda segment: segment.start) - 1
        last = bisect.bisect_left(self.segments, stop, key=lambda segment: segment.start)
        return self.segments[first:last]

    def change(self, later: PlacedVersion, segments: Sequence[Segment]) -> Segment:
        """Let a version with these segments hold from its position on; return the segment there."""
        self.later.append(later)
        if self.shared is not None and self.segments is self.shared.segments:
            self.segments = list(self.segments)
        return splice(self.segments, segments, later.position)

    def name_edit(self, position: int, column: int) -> str:
        """Return the edit with the dose of a column at a position, as text."""
        plan = self.plan
        for version in self.later:
            if version.position <= position and version.plan is not None:
                plan = version.plan.resolved
        source, site, layer = next(key for key, at in plan.measured.items() if at == column)
        return f"{path_of(source)} changed {site} of layer {layer}"

    @property
    def has_biases(self) -> bool:
        """Whether a version of the plan adds something to logits."""
        versions = [version.plan for version in self.later if version.plan is not None]
        return bool(self.plan.biases) or any(plan.resolved.biases for plan in versions)

    def biases_at(self, position: int) -> Sequence[ResolvedBias]:
        """Return what the version of the plan that holds at a position adds to logits."""
        for version in reversed(self.later):
            if version.position <= position:
                return () if version.plan is None else version.plan.resolved.biases
        return self.plan.biases

    def num_scored(self, start: int, stop: int) -> int:
        """Return how many positions of [start, stop) return their scores to the caller."""
        return sum(
            max(0, min(stop, segment.stop) - max(start, segment.start))
            for segment in self.segments_within(start, stop)
            if segment.scored
        )


def splice(segments: list[Segment], later: Sequence[Segment], position: int) -> Segment:
    """Let later segments take the place of segments from a position on; return the one there."""
    while segments and segments[-1].start >= position:
        segments.pop()
    if segments and segments[-1].stop > position:
        segments[-1] = segments[-1]._replace(stop=position)
    place = len(segments)
    for segment in later:
        if segment.stop > position:
            segments.append(
                segment if segment.start >= position else segment._replace(start=position)
            )
    return segments[place]


def idle_segment(start: int = 0, stop: int = FOREVER) -> Segment:
    """Return a segment without edits, probes and captures."""
    return Segment(start, stop, (), (), layout.IDLE_PROGRAM, layout.NO_GROUP, 0)


def acquire_segments(
    plan: list[PlanSegment],
    tables: ProgramTable,
    rows: CapturedRowIndex[Any],
    codecs: CodecTable,
    codec: str = "raw",
) -> list[Segment]:
    """Return a plan's segments with their programs and groups. Pair with `release_segments`."""
    segments: list[Segment] = []
    try:
        for piece in plan:
            start, stop, edits, _, scored, patterns, runs_tapped = piece
            if not runs_tapped:
                segments.append(idle_segment(start, stop))
                continue
            taps, returned = codecs.in_order(piece.captured), codecs.in_order(piece.taps)
            if patterns:
                number = codecs.pattern_number(codec, taps, returned, patterns)
            else:
                number = codecs.number(codec, taps) if taps else 0
            program = tables.acquire_program(edits)
            try:
                group = tables.acquire_group(taps)
            except SpecError:
                tables.release_program(edits)
                raise
            units = codecs.units_of(taps)
            kind = rows.kind(returned, number, units // codecs.encoding(number).units)
            where = (start, stop, edits, taps, program, group, kind, scored, number, units)
            rows_each = len(returned) + sum(read.is_row for read in patterns)
            segments.append(Segment(*where, patterns, rows_each))
    except SpecError:
        release_segments(segments, tables)
        raise
    return segments


def release_segments(segments: list[Segment], tables: ProgramTable) -> None:
    for segment in segments:
        if segment.program != layout.IDLE_PROGRAM:
            tables.release_program(segment.edits)
            tables.release_group(segment.taps)
