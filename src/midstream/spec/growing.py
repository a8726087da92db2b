"""Positions in a prompt that grows: which selections mean the same however long it gets."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.errors import SpecError
from midstream.spec.capture import Capture
from midstream.spec.fields import at
from midstream.spec.items import Item, Role, Span, Text, Window, show_item
from midstream.spec.operations import Edit
from midstream.spec.plan import Plan
from midstream.spec.positions import Positions

_INSTEAD = 'use "all", positions counted from the session\'s start, token ids, or "last"'


def check_growing(plan: Plan | None, before: Sequence[Edit], also: Sequence[Capture] = ()) -> None:
    """Refuses what has no meaning in a session of streaming input, whose prompt has no end yet.

    Args:
        plan: what the session asks for.
        before: the edits that come before its own.
        also: the captures that come after its own.

    Raises:
        SpecError: a phase, or an item that is counted from the prompt's end or looked for in the
            prompt's text.
    """
    for index, edit in enumerate(before):
        with at(f"steering[{index}]"):
            _check(edit.positions)
    for index, capture in enumerate(also, -len(also)):
        with at(f"sinks[{index}]"):
            _check(capture.positions)
    if plan is None:
        return
    for index, capture in enumerate(plan.captures):
        with at(f"capture[{index}]"):
            _check(capture.positions)
    for index, probe in enumerate(plan.probes):
        with at(f"probes[{index}]"):
            _check(probe.positions)
    for index, edit in enumerate(plan.edits):
        with at(f"edits[{plan.origin(index)}]"):
            _check(edit.positions)


def _check(positions: Positions) -> None:
    if positions.phase != "all":
        raise SpecError(
            "phase",
            f'"{positions.phase}" in a session of streaming input, where what was generated '
            f"becomes prompt with the next input; {_INSTEAD}",
        )
    for index, item in enumerate(positions.include):
        _check_item(item, positions.path(index))
    for index, item in enumerate(positions.exclude):
        _check_item(item, positions.exclude_path(index))


def _check_item(item: Item, path: str) -> None:
    if isinstance(item, (Text, Role)):
        why = "is looked for in a prompt's text, which is not known as a whole"
    elif isinstance(item, Window) or item in ("prompt", "generated", "last_prompt"):
        why = "depends on where the prompt ends, and this one grows"
    elif min(_bounds(item)) < 0:
        why = "counts from the prompt's end, and this one grows"
    else:
        return
    raise SpecError(path, f"{show_item(item)} in a session of streaming input {why}; {_INSTEAD}")


def _bounds(item: Item) -> tuple[int, int]:
    """The numbers in an item that count from the prompt's end where they are negative."""
    if isinstance(item, Span):
        return item.start, item.stop or 0
    return (item, item) if isinstance(item, int) else (0, 0)
