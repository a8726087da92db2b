"""Checks on positions in streaming-input sessions, whose prompt is not complete."""

from __future__ import annotations

from collections.abc import Sequence

from midstream.errors import SpecError
from midstream.plan.plan import Plan, ServerWide
from midstream.plan.positions.items import IN_PROMPT, Item, Span, Window, show_item
from midstream.plan.positions.positions import Positions
from midstream.plan.probe import Probe
from midstream.plan.readouts.capture import Capture
from midstream.validation import at

_INSTEAD = 'use "all", positions counted from the session\'s start, token ids, or "last_row"'


def check_growing(
    plan: Plan | None, before: Sequence[ServerWide], also: Sequence[Capture] = ()
) -> None:
    """Check that no position depends on the prompt's end, which moves in a streaming session."""
    for index, edit in enumerate(before):
        with at(f"steering[{index}]"):
            _check(edit.positions)
            if isinstance(edit, Probe):
                _check_act(edit)
    for index, capture in enumerate(also, -len(also)):
        with at(f"sinks[{index}]"):
            _check(capture.positions)
    if plan is None:
        return
    if plan.controller is not None:
        raise SpecError("controller", "unsupported in a streaming-input session; omit it")
    for index, readout in enumerate(plan.captures):
        with at(f"capture[{index}]"):
            for positions in readout.selections:
                _check(positions)
    for index, probe in enumerate(plan.probes):
        with at(f"probes[{index}]"):
            for positions in probe.selections:
                _check(positions)
            _check_act(probe)
    for index, edit in enumerate(plan.edits):
        with at(f"edits[{plan.origin(index)}]"):
            _check(edit.positions)


def _check_act(probe: Probe) -> None:
    if probe.act is not None:
        raise SpecError(
            "act",
            "unsupported in a streaming-input session, which goes on after a completion; omit "
            "`act`",
        )


def _check(positions: Positions) -> None:
    if positions.phase != "all":
        raise SpecError(
            "phase",
            f'"{positions.phase}" is unsupported in a streaming-input session, where generated '
            f"tokens become prompt tokens with the next input; {_INSTEAD}",
        )
    for index, item in enumerate(positions.include):
        _check_item(item, positions.path(index))
    for index, item in enumerate(positions.exclude):
        _check_item(item, positions.exclude_path(index))


def _check_item(item: Item, path: str) -> None:
    if isinstance(item, IN_PROMPT):
        why = "is located in the prompt, which is not complete"
    elif isinstance(item, Window) or item in ("prompt", "generated", "last_prompt"):
        why = "depends on where the prompt ends, and the prompt grows"
    elif min(_bounds(item)) < 0:
        why = "counts from the prompt's end, and the prompt grows"
    else:
        return
    raise SpecError(
        path,
        f"{show_item(item)} is unsupported in a streaming-input session: it {why}; {_INSTEAD}",
    )


def _bounds(item: Item) -> tuple[int, int]:
    """Return the item's numbers that count from the prompt's end if negative."""
    if isinstance(item, Span):
        return item.start, item.stop or 0
    return (item, item) if isinstance(item, int) else (0, 0)
