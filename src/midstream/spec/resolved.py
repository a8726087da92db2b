"""What one request asks for, made concrete: which vectors, at which taps, at which positions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from midstream.spec.ranges import Ranges, clip, count, merge
from midstream.spec.vector import Vector

Tap = tuple[str, int]  # (canonical site, layer from 0)


@dataclass(frozen=True, slots=True)
class ResolvedEdit:
    """h ← h + scale · vector at one tap, for the tokens at some positions."""

    site: str
    layer: int
    vector: Vector
    scale: float
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class ResolvedCapture:
    """Read some taps, for the tokens at some positions.

    Attributes:
        taps: in the order in which a forward pass reaches them.
        ranges: positions known now.
        last_from: where the request's final row may lie, if that is captured too: it is when its
            position is at least this. None: it is not.
    """

    taps: tuple[Tap, ...]
    ranges: Ranges
    last_from: int | None = None

    @property
    def last(self) -> bool:
        """Whether the request's final row is captured, wherever it turns out to be."""
        return self.last_from is not None

    @property
    def worker_ranges(self) -> Ranges:
        """What a worker has to capture: any row from `last_from` on may prove to be the last."""
        if self.last_from is None:
            return self.ranges
        return merge((*self.ranges, (self.last_from, None)))

    def final_ranges(self, length: int) -> Ranges:
        """What is captured of a request that ended with `length` rows."""
        final = length - 1
        if self.last_from is None or final < self.last_from:
            return clip(self.ranges, length)
        return clip(merge((*self.ranges, (final, length))), length)


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """A plan for one model and one prompt.

    `length` in the methods is the number of rows of the request, P + G − 1 when it has ended.

    Attributes:
        prompt_len: P, in tokens.
        edits: edits of one token at one tap apply in this order.
        captures: where two overlap, a row is captured once.
    """

    prompt_len: int
    edits: tuple[ResolvedEdit, ...]
    captures: tuple[ResolvedCapture, ...]

    def expected_rows(self, length: int) -> dict[Tap, int]:
        """How many rows each tap's capture has, for every tap that a capture names."""
        found: dict[Tap, int] = {}
        # Taps that are in the same captures have the same rows.
        by_captures: dict[tuple[int, ...], int] = {}
        for tap, indices in self._captures_by_tap().items():
            if indices not in by_captures:
                by_captures[indices] = count(self._final_ranges(indices, length), length)
            found[tap] = by_captures[indices]
        return found

    def capture_ranges(self, site: str, layer: int, length: int) -> tuple[tuple[int, int], ...]:
        """The positions captured at one tap, as ranges; none if nothing is captured there."""
        indices = self._captures_by_tap().get((site, layer), ())
        return clip(self._final_ranges(indices, length), length)

    def capture_positions(self, site: str, layer: int, length: int) -> list[int]:
        """The positions captured at one tap, ascending."""
        return [
            position
            for start, stop in self.capture_ranges(site, layer, length)
            for position in range(start, stop)
        ]

    def edit_counts(self, length: int) -> int:
        """How many times a vector is added to a token, over all edits."""
        return sum(count(edit.ranges, length) for edit in self.edits)

    def edited_tokens(self, length: int) -> int:
        """How many tokens get at least one edit."""
        return count(merge(each for edit in self.edits for each in edit.ranges), length)

    @property
    def captures_prompt(self) -> bool:
        """Whether a row of the prompt may be captured, so that its token must be computed."""
        return any(
            start < self.prompt_len
            for capture in self.captures
            for start, _ in capture.worker_ranges[:1]
        )

    @property
    def digest(self) -> str:
        """sha256 of all that changes what the model computes, in hex; captures do not."""
        content = [
            [edit.site, edit.layer, edit.vector.digest, edit.scale, edit.ranges]
            for edit in self.edits
        ]
        return hashlib.sha256(json.dumps(content, allow_nan=False).encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """The form in which a plan travels to the workers; see `wire`."""
        from midstream.spec.wire import to_bytes

        return to_bytes(self)

    @staticmethod
    def from_bytes(data: bytes) -> ResolvedPlan:
        """The plan that `to_bytes` wrote.

        Raises:
            SpecError: anything else.
        """
        from midstream.spec.wire import from_bytes

        return from_bytes(data)

    def _captures_by_tap(self) -> dict[Tap, tuple[int, ...]]:
        found: dict[Tap, list[int]] = {}
        for index, capture in enumerate(self.captures):
            for tap in capture.taps:
                found.setdefault(tap, []).append(index)
        return {tap: tuple(indices) for tap, indices in found.items()}

    def _final_ranges(self, indices: tuple[int, ...], length: int) -> Ranges:
        return merge(
            each for index in indices for each in self.captures[index].final_ranges(length)
        )
