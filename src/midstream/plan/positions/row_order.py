"""Order of the rows that a selection returns: that of their positions, which lists must have."""

from __future__ import annotations

from itertools import pairwise

from midstream.errors import SpecError
from midstream.plan.positions.items import Item, show_item
from midstream.plan.positions.positions import Positions

# Where "last_row" may be: at the prompt's last token or after it.
_Place = tuple[int, int]


def check_row_order(positions: Positions, prompt_len: int | None) -> None:
    """Check that a list of single positions is in the order of the rows of a result, each once.

    Items of several positions are not checked. If the prompt's length is None, only positions
    counted from the same end are compared.
    """
    items = positions.include
    if len(items) < 2:
        return
    if not all(isinstance(item, int) or item in ("last_prompt", "last_row") for item in items):
        return
    if prompt_len is None:
        for from_end in (False, True):
            alike = [index for index, item in enumerate(items) if _is_from_end(item) == from_end]
            _check(positions, alike, 0)
    else:
        _check(positions, range(len(items)), prompt_len)


def _check(positions: Positions, chosen: range | list[int], prompt_len: int) -> None:
    """Check some items, by their indices."""
    items = positions.include
    for before, after in pairwise(chosen):
        place, other = _place(items[before], prompt_len), _place(items[after], prompt_len)
        if place < other:
            continue
        first, second = show_item(items[before]), show_item(items[after])
        if place == other:
            raise SpecError(
                positions.path(after),
                f"position {second} is the same as {first}, which is listed too, and a result has "
                "one row for each position; list it once",
            )
        raise SpecError(
            positions.path(after),
            f"rows are in the order of their positions, and position {second} is before {first}, "
            "which is listed first; list positions in ascending order, and find the row of each "
            "by the `positions` of the result",
        )


def _is_from_end(item: Item) -> bool:
    return not isinstance(item, int) or item < 0


def _place(item: Item, prompt_len: int) -> _Place:
    """Return a key that ascends as positions do; "last_row" is after all others."""
    if item == "last_row":
        return (1, 0)
    position = -1 if item == "last_prompt" else item
    assert isinstance(position, int)
    return (0, position + prompt_len if position < 0 else position)
