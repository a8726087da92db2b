"""Expansion of names: an edit with registered names becomes edits with vectors by value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeVar

from midstream.errors import SpecError
from midstream.plan.operations.gate import Gate
from midstream.plan.operations.local import Edit
from midstream.plan.operations.steer import Steer
from midstream.plan.positions.positions import Positions
from midstream.plan.vectors.named_lookup import Lookup, NamedEdits
from midstream.plan.vectors.named_vector import Named
from midstream.validation import at

E = TypeVar("E", bound=Edit)


def expand_edits(
    edits: Sequence[Edit], known: Sequence[int], expand: Callable[[Edit], tuple[Edit, ...]]
) -> tuple[tuple[Edit, ...], tuple[int, ...]]:
    """Return the edits that each edit becomes, and each one's index before any expansion.

    `known` has their indices before an earlier one; empty: there was none.
    """
    expanded: list[Edit] = []
    origins: list[int] = []
    for index, edit in enumerate(edits):
        with at(f"edits[{index}]"):
            expanded.extend(expand(edit))
        origins += [known[index] if known else index] * (len(expanded) - len(origins))
    return tuple(expanded), tuple(origins)


def bind_edit(edit: Edit, lookup: Lookup, num_layers: int | None = None) -> tuple[Edit, ...]:
    """Return the edits that an edit stands for, with names replaced by what is registered.

    The scale of a Steer by a name of whole edits multiplies that of each Steer among them, also in
    a gate. Other edits do not scale: bounds of a clamp or a replaced value are absolute.
    """
    if isinstance(edit, Steer) and isinstance(edit.vector, Named):
        registered = lookup(edit.vector.name)
        if isinstance(registered, NamedEdits):
            _check_bare(edit, edit.vector.name)
            return _scaled_edits(edit.vector, edit.scale, registered)
    return edit.bind(lookup, num_layers)


def _check_bare(edit: Steer, name: str) -> None:
    """Check that a Steer for whole edits has nothing but a scale."""
    problems = {
        "layer": "layer" not in edit.left,
        "site": "site" not in edit.left,
        "norm": edit.norm is not None,
        "phase": edit.positions.phase != "all",
        "positions": edit.positions != Positions("all"),
    }
    for field, is_given in problems.items():
        if is_given:
            raise SpecError(
                field,
                f"must be omitted: `{name}` is registered with whole edits, which have their own",
            )


def _scaled_edits(named: Named, scale: float, named_edits: NamedEdits) -> tuple[Edit, ...]:
    factor = named.scale * scale
    if factor == 0.0:
        for edit in named_edits.edits:
            if not isinstance(edit.edit if isinstance(edit, Gate) else edit, Steer):
                raise SpecError(
                    "scale",
                    f"0 would leave the {edit.op} of `{named.name}`, which does not scale; omit "
                    "the name to apply none of its edits",
                )
    return tuple(_scaled_edit(edit, factor) for edit in named_edits.edits)


def _scaled_edit(edit: E, factor: float) -> E:
    if isinstance(edit, Gate):
        return dataclasses.replace(edit, edit=_scaled_edit(edit.edit, factor))
    if isinstance(edit, Steer) and factor != 1.0:
        return edit.replace(scale=edit.scale * factor)
    return edit
