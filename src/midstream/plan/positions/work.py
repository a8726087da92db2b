"""`WorkBudget`: what resolving the plan of one request may cost, counted before it is done.

What is linear in the plan and in the prompt is never refused; the limits are for products.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from midstream.errors import SpecError
from midstream.plan.positions.range_set import overlay
from midstream.plan.positions.ranges import Ranges

# Tokens and ranges that all selections of a plan match, before overlaps are merged.
MAX_MATCHES = 1 << 18
# Taps of all captures, edits and probes of a plan, and of the versions that it may change to.
MAX_TAPS = 1 << 17
# Parts of a plan that apply in each segment of positions between their bounds, in all versions.
MAX_SEGMENTS = 1 << 20
# The same, for segments in which other parts apply than in any segment before.
MAX_COMBINED = 1 << 15
# Prompts of one call, times the taps and positions of the plan that each of them gets.
MAX_CALLED = 1 << 20
# Messages that are rendered to locate those of one chat, counted in every rendering.
MAX_RENDERED = 1 << 16


class WorkBudget:
    """Counts the work for one plan. It is shared by all selections of the plan."""

    def __init__(self) -> None:
        self._matches = 0

    def match(self, count: int) -> None:
        """Count tokens or ranges that a selection matches."""
        self._matches += count
        if self._matches > MAX_MATCHES:
            raise SpecError(
                "",
                f"with this the positions of the plan match {self._matches} tokens and ranges "
                f"before overlaps are merged, and the budget is {MAX_MATCHES}; select fewer, or "
                "rarer texts and token ids, or ranges such as slice(3, 9)",
            )


def check_taps(count: int) -> None:
    """Check the number of taps of a plan: layers times sites of each part."""
    if count > MAX_TAPS:
        raise SpecError(
            "",
            f"the plan has {count} taps (layers times sites of each capture, edit and probe, in "
            f"each version that it may change to), and the budget is {MAX_TAPS}; name fewer layers "
            "or sites, or combine parts",
        )


def check_called(prompts: int, size: int) -> None:
    """Check the work for all prompts of a call, each of so many taps and positions."""
    if prompts > 1 and prompts * size > MAX_CALLED:
        raise SpecError(
            "",
            f"{prompts} prompts times {size} taps and positions of the plan is above the budget of "
            f"{MAX_CALLED}; send fewer prompts at a time, or name fewer layers, sites or positions",
        )


def check_overlaps(parts: Sequence[tuple[Ranges, int]], versions: int) -> None:
    """Check in how many segments and combinations parts apply; of each, positions and weight."""
    bounds = sorted({bound for ranges, _ in parts for bound in _bounds(ranges)})
    count = versions * sum(
        (len(bounds) if stop is None else bisect_left(bounds, stop)) - bisect_left(bounds, start)
        for ranges, _ in parts
        for start, stop in ranges
    )
    if count > MAX_SEGMENTS:
        raise SpecError("", _OVERLAPS.format("segments of positions", count, MAX_SEGMENTS))
    combined = 0
    if count * max((weight for _, weight in parts), default=0) > MAX_COMBINED:
        sets = {indices for *_, indices in overlay([ranges for ranges, _ in parts])}
        combined = versions * sum(parts[index][1] for indices in sets for index in indices)
    if combined > MAX_COMBINED:
        raise SpecError("", _OVERLAPS.format("combinations", combined, MAX_COMBINED))


_OVERLAPS = (
    "the captures, edits and probes of the plan apply beside each other in {1} {0} (counted for "
    "each of these parts, and in each version of the plan), and the budget is {2}; use fewer "
    "parts, or let them have the same positions"
)


def check_rendered(count: int) -> None:
    """Check the number of messages that are rendered to locate those of a chat."""
    if count > MAX_RENDERED:
        raise SpecError(
            "",
            "the chat template treats contents differently, so that each of them takes a rendering "
            f"of its own: {count} messages so far, and the budget is {MAX_RENDERED}; select by "
            "text or positions, or send fewer messages",
        )


def _bounds(ranges: Ranges) -> Iterable[int]:
    for start, stop in ranges:
        yield start
        if stop is not None:
            yield stop
