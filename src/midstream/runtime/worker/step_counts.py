"""What the steps of one worker came to, counted since it started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepCounts:
    """A few additions a step.

    Attributes:
        steps: forwards.
        active: of these, those in which some token asked for something.
        planner_ns: nanoseconds in which the planner laid them all out.
        ring_last: rows of the staging ring that the last active step took.
        ring_most: the most that one took.
    """

    steps: int = 0
    active: int = 0
    planner_ns: int = 0
    ring_last: int = 0
    ring_most: int = 0

    def take(self, rows: int) -> None:
        """An active step captures so many rows."""
        self.active += 1
        self.ring_last = rows
        self.ring_most = max(self.ring_most, rows)
