"""Segments of a resolved plan: the front end counts them for admission, the worker runs them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from midstream.plan import Instruction, ResolvedPlan, Vector
from midstream.plan.positions.automaton import Automaton
from midstream.plan.positions.range_set import overlay, subtract
from midstream.plan.positions.ranges import Ranges
from midstream.plan.resolved import (
    ON_DEVICE,
    Pattern,
    ResolvedEdit,
    ResolvedProbe,
    SlottedPattern,
)
from midstream.plan.vectors.device_row import DeviceRow
from midstream.sites import Tap

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class TapProgramStep:
    """The instructions of one edit or probe at one tap, compared and hashed by content."""

    tap: int  # index
    steps: tuple[Instruction, ...]
    digest: str  # of the steps; see `midstream.plan.resolved.digest_steps`
    ids: tuple[int, ...] = ()  # token ids to which the edit applies; empty: every id
    others: bool = False  # it applies to all ids except `ids`
    # Number of the automaton that selects the tokens, a bit of `layout.SELECTED`; None: none does.
    bit: int | None = None
    dose: int | None = None  # column of its dose; None: it is not measured
    _key: tuple[object, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        key = (self.tap, self.digest, self.ids, self.others, self.bit, self.dose)
        object.__setattr__(self, "_key", key)
        object.__setattr__(self, "_hash", hash(key))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TapProgramStep) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @property
    def by_token(self) -> bool:
        """Whether it depends on tokens that are known on the device alone whether it applies."""
        return bool(self.ids) or self.bit is not None

    @property
    def counted(self) -> int:
        """Number that the device adds to its tally when it runs the edit."""
        return sum(step.counted for step in self.steps)


@dataclass(frozen=True, slots=True)
class Room:
    """Capacity for the plans of all running requests: the settings of these names."""

    bank_rows: int
    programs: int  # combinations of edits, and likewise combinations of captures
    max_edits: int  # instructions, counted once for each program
    token_ids: int
    probes: int
    maps: int = 0
    gate_states: int = 0  # gates with memory, counted once for each request


def vectors_of(step: Instruction) -> Iterator[tuple[Vector, ...]]:
    """Yield the vectors that an instruction needs in consecutive bank rows, which they identify."""
    if step.read is not None:
        yield (step.read,)
    if step.write:
        yield step.write
    if step.mask is not None:
        yield (step.mask,)


def device_rows_of(plan: ResolvedPlan) -> Iterator[tuple[ResolvedEdit, DeviceRow]]:
    """Yield the rows on the device that a plan's edits name, each with its edit."""
    for edit in plan.edits:
        for step in edit.steps.instructions:
            for row in step.write:
                if isinstance(row, DeviceRow):
                    yield edit, row


Edits = tuple[TapProgramStep, ...]  # at one tap, in order
FOREVER = np.iinfo(np.int64).max // 2


# States of a position in `RequestState.done`: nothing was requested for it; it was never computed
# because the prefix cache served it; from APPLIED_0 on, computed with that many edits.
UNSEEN = 0
CACHED = 1
APPLIED_0 = 2
MOST_APPLIED = 0x7FFF
# Bit of a state: the position had a value that is not finite, see `layout.NONFINITE`.
NONFINITE = 0x8000


class RankShare(NamedTuple):
    """The part of the work that one rank of a tensor-parallel group does alone."""

    rank: int
    ranks: int
    # For each tap, by its index, the number of parts in which the ranks have its vectors; empty: 1
    # for every tap. With fewer parts than ranks, ranks next to each other have the same part.
    parts: tuple[int, ...] = ()

    def of(self, taps: tuple[T, ...], sharded: bool) -> tuple[T, ...]:
        """Return the taps whose rows this rank transfers, of those that every rank has whole."""
        if sharded:
            # Depends on these taps alone, so requests that capture the same taps agree.
            return taps[self.rank :: self.ranks]
        return () if self.rank else taps

    def of_indices(self, taps: tuple[int, ...], sharded: bool) -> tuple[int, ...]:
        """Return the taps, by index, whose rows or parts of rows this rank transfers."""
        if not self.parts:
            return self.of(taps, sharded)
        whole = self.of(tuple(tap for tap in taps if self.parts[tap] == 1), sharded)
        mine = [tap for tap in taps if self.parts[tap] > 1 and self.rank % self.copies(tap) == 0]
        return tuple(sorted((*whole, *mine)))

    def copies(self, tap: int) -> int:
        """Return the number of ranks that have the same part of a tap's vectors."""
        return self.ranks // self.parts[tap]

    def parts_of(self, tap: int) -> int:
        """Return the number of parts in which the ranks have the vectors of a tap."""
        return self.parts[tap] if self.parts else 1

    def returns(self, tap: int) -> bool:
        """Return whether this rank returns its rows of attention, or its logits, at a tap."""
        return self.rank % self.copies(tap) == 0 if self.parts_of(tap) > 1 else self.rank == 0


WHOLE = RankShare(0, 1)


class PatternRead(NamedTuple):
    """A row made of queries, of logits, or of reduced vectors at a tap, or a score of attention."""

    tap: int  # index, on this rank
    capture: int  # index in the plan, and `place` of the row's tap in it; of a score −1
    place: int
    pattern: Pattern
    heads: tuple[int, ...]  # of this rank that are computed, ascending; empty: all of them
    num_heads: int  # of a score it may be 0: other ranks have its heads
    # If not, the rank computes its part of the logits, which only all ranks together can, or counts
    # the vector among those of a later row.
    returned: bool = True
    slot: int | None = None  # column of the score; None: it is a row

    @property
    def is_row(self) -> bool:
        return self.returned and self.slot is None


class PlanSegment(NamedTuple):
    """Positions [start, stop) with the same edits, probes and captures, without a program yet."""

    start: int
    stop: int
    edits: Edits
    taps: tuple[int, ...]  # indices, on this rank, of those whose vectors are returned
    scored: bool  # a score there is returned to the caller
    # Rows of attention that are returned, and scores that are made of attention.
    patterns: tuple[PatternRead, ...] = ()
    runs_tapped: bool = True  # a rank of the group has some, so all run the tapped model

    @property
    def captured(self) -> tuple[int, ...]:
        """Taps whose vectors are copied into the staging ring."""
        if not self.patterns:
            return self.taps
        return tuple(sorted({*self.taps, *(read.tap for read in self.patterns)}))

    def shared(self, sharded: bool) -> Hashable:
        """Return what decides which of the taps each of several ranks copies."""
        reads = frozenset((read.tap, read.pattern.of_logits) for read in self.patterns)
        return sharded, self.taps, reads


@dataclass(frozen=True, slots=True)
class _Part:
    """An edit, probe or capture at some positions; without any, one that other ranks have."""

    ranges: Ranges
    edit: TapProgramStep | None = None
    taps: tuple[int, ...] = ()
    scored: bool = False
    patterns: tuple[PatternRead, ...] = ()


def cut(plan: ResolvedPlan, taps: dict[Tap, int], share: RankShare) -> list[PlanSegment]:
    """Cut a plan into segments over [0, FOREVER), at positions that are those of all ranks."""
    parts = _parts(plan, taps, share)
    pieces = []
    known: dict[tuple[int, ...], PlanSegment] = {}
    for start, stop, indices in overlay([part.ranges for part in parts]):
        end = FOREVER if stop is None else stop
        piece = known.get(indices)
        if piece is None:
            here = [parts[index] for index in indices]
            edits = tuple(part.edit for part in here if part.edit is not None)
            places = tuple(sorted({tap for part in here for tap in part.taps}))
            scored = any(part.scored for part in here)
            mine = share.of_indices(places, plan.sharded)
            reads = tuple(read for part in here for read in part.patterns)
            piece = PlanSegment(start, end, edits, mine, scored, reads, bool(here))
            known[indices] = piece
        pieces.append(piece._replace(start=start, stop=end))
    return pieces


def _parts(plan: ResolvedPlan, taps: dict[Tap, int], share: RankShare) -> list[_Part]:
    """Return the parts of a plan at these taps, in the order in which they apply at each."""
    parts = []
    for edit in plan.edits:
        index = taps.get((edit.site, edit.layer))
        if index is not None:
            dose = plan.measured.get((edit.source, edit.site, edit.layer))
            parts += _selected(index, edit, plan.automata, dose)
    if plan.automata:
        # Automata read each generated token, whether or not an edit may apply there.
        parts.append(_Part(((min(automaton.start for automaton in plan.automata), None),)))
    for probe in plan.probes:
        index = taps.get(probe.tap)
        if index is not None and probe.attention is not None:
            mine = share.returns(index)
            means = (_mean(probe.attention, index, share),) if mine else ()
            parts.append(_Part(probe.where.possible, patterns=means, scored=mine))
        elif index is not None and probe.is_scan:
            parts += _selected(index, probe, plan.automata)
        elif index is not None:
            read = TapProgramStep(index, probe.steps.instructions, probe.steps.digest)
            # Scores are few: the first rank returns all of them, but for those whose parts are on
            # several ranks.
            scored = share.returns(index) and bool(probe.name)
            # The front end drops scores at positions that the probe turns out not to select.
            parts.append(_Part(probe.where.possible, read, scored=scored))
    for capture_index, capture in enumerate(plan.captures):
        if capture.pattern is not None:
            if taps.keys().isdisjoint(capture.pattern.reads):
                continue
            reads = _reads(capture_index, capture.pattern, taps, share)
            parts.append(_Part(capture.returned, patterns=reads))
            # Rows that are counted for the row that the last of them returns.
            counted = tuple(read._replace(returned=False) for read in reads)
            before = subtract(capture.where.possible, capture.returned)
            parts.append(_Part(before, patterns=counted))
            continue
        places = tuple(taps[tap] for tap in capture.taps if tap in taps)
        if places:
            parts.append(_Part(capture.where.possible, taps=places))
    return parts


def _selected(
    tap: int,
    selected: ResolvedEdit | ResolvedProbe,
    automata: tuple[Automaton, ...],
    dose: int | None = None,
) -> list[_Part]:
    """Return instructions at one tap for the tokens that are selected, by position and by token."""
    parts, steps, where = [], selected.steps, selected.where
    if where.ranges:
        every = TapProgramStep(tap, steps.instructions, steps.digest, dose=dose)
        parts.append(_Part(where.ranges, every))
    for match in where.matches:
        bit = None if match.automaton is None else automata.index(match.automaton)
        known = tap, steps.instructions, steps.digest
        only = TapProgramStep(*known, match.ids, match.others, bit, dose)
        parts.append(_Part(match.ranges, only))
    return parts


def _reads(
    capture: int, pattern: Pattern, taps: dict[Tap, int], share: RankShare
) -> tuple[PatternRead, ...]:
    """Return a rank's rows of attention or of reduced vectors of a capture, or the logits, which
    each rank of a tensor-parallel group makes with the others; or the rows that each keeps.
    """
    return tuple(
        PatternRead(
            index,
            capture,
            place,
            pattern,
            pattern.heads,
            pattern.counts[place] // share.parts_of(index),
            share.returns(index),
        )
        for place, tap in enumerate(pattern.reads)
        if (index := taps.get(tap)) is not None
        and (pattern.of_logits or pattern.kind == ON_DEVICE or share.returns(index))
    )


def _mean(attention: SlottedPattern, tap: int, share: RankShare) -> PatternRead:
    """Return a rank's part of a score that is made of attention."""
    slot, pattern, num_heads = attention
    parts, heads = share.parts_of(tap), pattern.heads
    if parts > 1 and heads:
        here = num_heads // parts
        part = share.rank // share.copies(tap)
        heads = tuple(head % here for head in heads if head // here == part)
        return PatternRead(tap, -1, -1, pattern, heads, len(heads), slot=slot)
    return PatternRead(tap, -1, -1, pattern, heads, pattern.counts[0] // parts, slot=slot)
