"""Placement of an edit's rows: the k-th row goes to the k-th position, as these are listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from midstream.errors import SpecError
from midstream.ops.layout import Flags
from midstream.plan.instructions import Instruction
from midstream.plan.positions.position_set import Where
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.prompt import Prompt
from midstream.plan.positions.select import in_listed_order
from midstream.validation import MAX_ITEMS

Instructions = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class RowPlacement:
    """Places the rows of edits of one prompt; `order` is of positions that were listed."""

    prompt: Prompt
    max_tokens: int | None
    order: dict[Positions, list[int]] = field(default_factory=dict)

    def place(
        self, steps: Instructions, positions: Positions, where: Where
    ) -> list[tuple[Instructions, Where]]:
        """Return (instructions, positions) of each run; the k-th position gets the k-th row."""
        rows = max(len(step.write) for step in steps)
        if not where.is_bounded:
            raise SpecError(
                "positions",
                f"with {rows} rows, one per position, the positions must be fixed and "
                "bounded; give a single row, or positions like slice(3, 9)",
            )
        order: Sequence[int] = range(rows)
        if len(positions.include) > 1:
            order = self._order(positions, rows)
        runs = [(start, stop) for start, stop in where.ranges if stop is not None]
        count = sum(stop - start for start, stop in runs)
        if count != rows:
            raise SpecError(
                "rows",
                f"got {rows} rows for {count} positions; give one row, or one per position",
            )
        parts = []
        used = 0
        for start, stop in runs:
            chosen = order[used : used + stop - start]
            used += stop - start
            placed = tuple(_with_rows(step, chosen, start) for step in steps)
            parts.append((placed, Where(((start, stop),))))
        return parts

    def _order(self, positions: Positions, rows: int) -> list[int]:
        """Return which of the listed positions is the first, the second, … of the prompt."""
        order = self.order.get(positions)
        if order is None:
            listed = in_listed_order(positions, self.prompt, self.max_tokens, MAX_ITEMS + 1)
            order = sorted(range(len(listed)), key=listed.__getitem__)
            for place, after in pairwise(order):
                if listed[place] == listed[after]:
                    raise SpecError(
                        "positions",
                        f"position {listed[place]} is listed twice, so it is not clear which of "
                        f"the {rows} rows it gets; list each position once",
                    )
            self.order[positions] = order
        return order


def _with_rows(step: Instruction, chosen: Sequence[int], first: int) -> Instruction:
    """Return an instruction with some of its rows, the first of them for position `first`."""
    if len(step.write) <= 1:
        return step
    flags = step.flags | Flags.ROW_BY_POSITION
    return replace(step, write=tuple(step.write[row] for row in chosen), first=first, flags=flags)
