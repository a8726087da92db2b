"""Prefix-cache keys: which KV blocks of a steered request may be shared. vLLM finds a block by a
hash of its tokens, of the block before it and of extra keys. One in which a token is edited gets a
key made from the edits there, which later blocks inherit by the hashes; where an image's tokens
attend to later ones, it counts as going on to the image's end, see `runtime.core.image_ranges`.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace

import msgspec

from midstream.ops import layout
from midstream.plan import Instruction, ResolvedPlan, ResolvedProbe
from midstream.plan.positions.range_set import overlay
from midstream.plan.positions.ranges import Ranges
from midstream.plan.readouts.reduced import RETURNED, SUMS
from midstream.plan.resolved import digest_steps
from midstream.runtime.protocol.codec import Natural, ProtocolMessage

# The mark of positions without edits.
PLAIN = ""
UNMARKED = (PLAIN,)  # the marks of a request without edits


class _Segments:
    """Segments of positions, each with the mark of its edits."""

    __slots__ = ()
    starts: Sequence[int]
    marks: Sequence[str]

    def of_block(self, start: int, stop: int) -> str | None:
        """Return the extra key of the block of positions [start, stop); None without edits."""
        first = bisect.bisect_right(self.starts, start) - 1
        last = bisect.bisect_left(self.starts, stop)
        if last - first == 1:
            return self.marks[first] or None
        if not any(self.marks[first:last]):
            return None
        # The key includes where in the block each segment begins.
        parts = [
            f"{max(self.starts[index], start) - start}:{self.marks[index]}"
            for index in range(first, last)
        ]
        return "|".join(parts)

    def first_edited(self, position: int) -> int | None:
        """Return the first edited position at or after `position`; None if there is none."""
        for index in range(bisect.bisect_right(self.starts, position) - 1, len(self.starts)):
            if self.marks[index]:
                return max(self.starts[index], position)
        return None


class KeptScore(ProtocolMessage, frozen=True, array_like=True):
    """A probe's score, which the workers keep for the tokens of cached blocks; or a number that a
    gate remembers after each of these tokens; or the sums of rows that a capture reduces, which
    they keep for the ends of these blocks.
    """

    # Digest in hex of how it is computed from a row; equal keys in a plan have equal ranges. Of
    # sums and of gates, also of the selected positions, but for where the last range stops: before
    # that, equal keys select the same.
    key: str
    # Its column among the plan's scores, as of the score that a gate reads; of sums, the index of
    # the capture.
    slot: Natural
    ranges: Ranges  # positions that may have one, or that are counted
    nbytes: Natural = 0  # of sums at one block's end, at most, on one rank; 0: it is no sum
    # Of a gate: 1 + which number of it, see `layout.MEMORY_COLUMNS`; 0: it is of none.
    memory: Natural = 0


class CacheKeys(ProtocolMessage, _Segments, frozen=True, array_like=True):
    """Prefix-cache keys of one request."""

    starts: tuple[int, ...]  # of the segments, ascending from 0; the last has no end
    # Per segment, a digest in hex of the edits of every token there; `PLAIN` for none. Made from
    # content alone, so that requests with equal edits share blocks.
    marks: tuple[str, ...]
    # Position whose row must be computed, as it is captured: what the cache serves has no row. Of
    # rows that are reduced, it is that of the last.
    first_read: int | None
    # Of positions that may be cached with their scores, or with their sums.
    scores: tuple[KeptScore, ...] = ()

    def __post_init__(self) -> None:
        starts = self.starts
        ascending = all(a < b for a, b in zip(starts, starts[1:], strict=False))
        if starts[:1] != (0,) or not ascending or len(self.marks) != len(starts):
            raise ValueError(
                "expected ascending `starts` from 0 and as many `marks`, got "
                f"{len(starts)} and {len(self.marks)}"
            )


class ChangedKeys(_Segments):
    """Prefix-cache keys of a running request whose plan changes; see `CacheKeys`."""

    __slots__ = ("first_read", "marks", "starts")
    starts: list[int]
    marks: list[str]

    def __init__(self, keys: CacheKeys) -> None:
        self.starts = list(keys.starts)
        self.marks = list(keys.marks)
        self.first_read = keys.first_read

    def change(self, position: int, later: CacheKeys) -> None:
        """Let the keys be `later` from a position on, of a plan with the same reads."""
        starts, marks = self.starts, self.marks
        while starts and starts[-1] >= position:
            starts.pop()
            marks.pop()
        first = bisect.bisect_right(later.starts, position) - 1
        for index in range(first, len(later.starts)):
            if not marks or marks[-1] != later.marks[index]:
                starts.append(max(later.starts[index], position))
                marks.append(later.marks[index])


def cache_keys(plan: ResolvedPlan) -> CacheKeys:
    """Return the keys of a plan. Captures and named probes change no KV and are in no mark."""
    parts = _parts(plan)
    starts: list[int] = []
    marks: list[str] = []
    made: dict[tuple[int, ...], str] = {(): PLAIN}
    for start, _, here in overlay([ranges for ranges, _ in parts]):
        if here not in made:
            content = json.dumps([parts[index][1] for index in here])
            made[here] = hashlib.sha256(content.encode()).hexdigest()
        if not marks or made[here] != marks[-1]:
            starts.append(start)
            marks.append(made[here])
    firsts = [capture.returned[0][0] for capture in plan.captures if capture.returned]
    firsts += first_computed(plan)
    kept = [probe for probe in plan.probes if _is_kept(probe)]
    scores = [score for probe in kept for score in _kept_scores(plan, probe)]
    scores = [*scores, *_kept_sums(plan), *_kept_memory(plan)]
    return CacheKeys(tuple(starts), tuple(marks), min(firsts, default=None), _distinct(scores))


def _distinct(scores: list[KeptScore]) -> tuple[KeptScore, ...]:
    """Return scores where one that is read at other positions too has another key there: workers
    keep a number of every row of a request, also of rows that its probe or gate does not select.
    """
    known: dict[str, list[Ranges]] = {}
    distinct = []
    for score in scores:
        ranges = known.setdefault(score.key, [])
        if score.ranges not in ranges:
            ranges.append(score.ranges)
        if number := ranges.index(score.ranges):
            score = msgspec.structs.replace(score, key=f"{score.key}.{number}")
        distinct.append(score)
    return tuple(distinct)


def first_computed(plan: ResolvedPlan) -> list[int]:
    """Return the first position of each probe and automaton from which every token must be computed
    that it reads, cached or not.
    """
    ranges = [probe.where.possible for probe in plan.probes if _is_computed(probe)]
    return [
        *(mine[0][0] for mine in ranges if mine),
        *(automaton.start for automaton in plan.automata),
    ]


def _is_computed(probe: ResolvedProbe) -> bool:
    # An attention's score is that of queries, which are captured; and what an automaton selects
    # depends on tokens that may be in no block.
    return probe.attention is not None or (probe.is_scan and bool(probe.where.automata))


def _is_kept(probe: ResolvedProbe) -> bool:
    return bool(probe.name and not _is_computed(probe) and probe.where.possible)


def _kept_scores(plan: ResolvedPlan, probe: ResolvedProbe) -> list[KeptScore]:
    """Return a named probe's numbers. Their keys have no edits: those are in the keys of blocks."""
    if len(probe.slots) > 1:
        contents = [[[probe.site, probe.layer, _content((s,))]] for s in probe.steps.instructions]
    else:
        parts = [part for part in plan.probes if part is probe or part.part_of == probe.name]
        contents = [[[p.site, p.layer, _content(p.steps.instructions)] for p in parts]]
    return [
        KeptScore(hashlib.sha256(json.dumps(content).encode()).hexdigest(), slot, ranges)
        for ranges in [probe.where.possible]
        for slot, content in zip(probe.slots, contents, strict=True)
    ]


def _kept_sums(plan: ResolvedPlan) -> Iterator[KeptScore]:
    """Yield what is kept of each capture that reduces rows. A hit ends before the last of these."""
    for index, capture in enumerate(plan.captures):
        pattern = capture.pattern
        if pattern is None or not pattern.reduces:
            continue
        ranges = capture.where.ranges
        content = [pattern.kind, pattern.reads, pattern.counts, ranges[:-1], ranges[-1][0]]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        components = (pattern.size - 1) // RETURNED[pattern.kind] * sum(pattern.counts)
        yield KeptScore(key, index, ranges, 8 * SUMS[pattern.kind] * components)


def _kept_memory(plan: ResolvedPlan) -> Iterator[KeptScore]:
    """Yield the numbers that gates with memory have after each token that they may read."""
    for probe in plan.probes:
        where = probe.where
        if not probe.is_scan or _is_computed(probe) or not where.possible:
            continue
        selected: list[object] = [where.ranges[:-1], where.ranges[-1:] and where.ranges[-1][0]]
        if where.matches:
            selected = [where.ranges, [astuple(match) for match in where.matches]]
        content = [probe.site, probe.layer, _content(probe.steps.instructions), selected]
        key = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        for number in range(1, layout.MEMORY_COLUMNS + 1):
            yield KeptScore(f"{key}.{number}", probe.slot, where.possible, memory=number)


def _content(steps: tuple[Instruction, ...]) -> str:
    """Return what a number is computed by, without the column that it has in its plan."""
    *before, last = steps
    return digest_steps((*before, replace(last, slot=0)))


def _parts(plan: ResolvedPlan) -> list[tuple[Ranges, list[object]]]:
    """Return (positions, content) of each part that changes KV, in the order of the plan."""
    parts: list[tuple[Ranges, list[object]]] = []
    for edit in plan.edits:
        if edit.site == "logits":
            continue  # they come after all KV
        content: list[object] = [edit.site, edit.layer, edit.steps.digest]
        if edit.where.ranges:
            parts.append((edit.where.ranges, content))
        for match in edit.where.matches:
            read = [] if match.automaton is None else [astuple(match.automaton)]
            parts.append((match.ranges, [*content, list(match.ids), match.others, *read]))
    for function in plan.functions:
        parts.append((function.where.ranges, [function.site, function.layer, function.key]))
    for probe in plan.probes:
        if not probe.name and not probe.part_of:
            # What gates read is part of what they do.
            parts.append((probe.where.possible, [probe.site, probe.layer, probe.steps.digest]))
    return parts
