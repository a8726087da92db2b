"""What of a request's KV nobody else may be served, block by block, and what it may not be served.

The KV of a token depends on the tokens up to it and on the edits that these got. A block of vLLM's
prefix cache is found by a hash of its tokens, of the block before it and of extra keys. So a block
in which a token is edited gets a key made from the edits there; the blocks after it inherit it
through the chain, and the blocks before it are shared with everybody.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from midstream.spec import ResolvedPlan
from midstream.spec.positions.range_set import overlay
from midstream.spec.positions.ranges import Ranges

# The mark of positions at which nothing is edited.
PLAIN = ""


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """One request's place in the prefix cache.

    Attributes:
        starts: where each segment of positions begins, ascending; the first is 0, the last has no
            end.
        marks: per segment, a digest of what every token there gets, in hex; `PLAIN` for nothing.
            Made from content alone, so that whoever asks for the same gets the same.
        first_read: the first position whose row must be computed, because it is captured or
            probed: what the cache serves has no row. None: no position need be.
    """

    starts: tuple[int, ...]
    marks: tuple[str, ...]
    first_read: int | None

    def of_block(self, start: int, stop: int) -> str | None:
        """The extra key of the block of positions [start, stop); None where it is plain."""
        first = bisect.bisect_right(self.starts, start) - 1
        last = bisect.bisect_left(self.starts, stop)
        if last - first == 1:
            return self.marks[first] or None
        if not any(self.marks[first:last]):
            return None
        # Where in the block each segment begins is part of what was done there.
        parts = [
            f"{max(self.starts[nth], start) - start}:{self.marks[nth]}"
            for nth in range(first, last)
        ]
        return "|".join(parts)

    def first_edited(self, position: int) -> int | None:
        """The first edited position at or after this one; None where there is none."""
        for nth in range(bisect.bisect_right(self.starts, position) - 1, len(self.starts)):
            if self.marks[nth]:
                return max(self.starts[nth], position)
        return None

    def pack(self) -> list[object]:
        """Plain values that msgpack carries unchanged."""
        return [list(self.starts), list(self.marks), self.first_read]

    @staticmethod
    def unpack(value: object) -> CacheKeys:
        """What `pack` gave.

        Raises:
            ValueError: anything else.
        """
        if isinstance(value, (list, tuple)) and len(value) == 3:
            starts, marks, first_read = value
            if (
                _all_of(int, starts)
                and _all_of(str, marks)
                and (first_read is None or isinstance(first_read, int))
                and list(starts[:1]) == [0]
                and len(marks) == len(starts)
                and all(a < b for a, b in zip(starts, starts[1:], strict=False))
            ):
                return CacheKeys(tuple(starts), tuple(marks), first_read)
        raise ValueError("these are no cache keys")


def cache_keys(plan: ResolvedPlan) -> CacheKeys:
    """The keys of a plan. Captures and named probes change nothing: they are in no mark."""
    parts = _parts(plan)
    starts: list[int] = []
    marks: list[str] = []
    made: dict[tuple[int, ...], str] = {(): PLAIN}
    for start, _, here in overlay([ranges for ranges, _ in parts]):
        if here not in made:
            made[here] = _digest([parts[nth][1] for nth in here])
        if not marks or made[here] != marks[-1]:
            starts.append(start)
            marks.append(made[here])
    reads = [capture.where.possible for capture in plan.captures]
    reads += [probe.where.possible for probe in plan.probes if probe.name]
    firsts = [ranges[0][0] for ranges in reads if ranges]
    return CacheKeys(tuple(starts), tuple(marks), min(firsts, default=None))


def _parts(plan: ResolvedPlan) -> list[tuple[Ranges, list[object]]]:
    """(positions, content) of all that changes what is computed, in the order of the plan."""
    parts: list[tuple[Ranges, list[object]]] = []
    for edit in plan.edits:
        content: list[object] = [edit.site, edit.layer, edit.steps.digest]
        if edit.where.ranges:
            parts.append((edit.where.ranges, content))
        for match in edit.where.matches:
            parts.append((match.ranges, [*content, list(match.ids), match.others]))
    for probe in plan.probes:
        if not probe.name:
            # What gates read is part of what they do.
            parts.append((probe.where.possible, [probe.site, probe.layer, probe.steps.digest]))
    return parts


def _all_of(form: type, values: object) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(one, form) for one in values)


def _digest(content: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
