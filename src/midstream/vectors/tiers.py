"""Edits as steering tiers have them: vectors by hook point and layer, names, or edits."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import NamedTuple

from midstream.errors import SpecError
from midstream.spec.fields import MAX_PARTS, at, kind
from midstream.spec.named import Named
from midstream.spec.operations import Edit, Gate, Steer, parse_edit
from midstream.vectors.reading import read_placed

_FORMS = (
    "an edit, a registered name, (name, scale), {hook point: {layer: vector}}, or a list of these"
)
_REFERENCE = 'a registered name, (name, scale) or {"name": …, "scale": …}'


class Part(NamedTuple):
    """One edit of a tier.

    Attributes:
        path: where it stands in what was read, for messages: `[2]`, `["post_block"][15]`, or
            nothing where it is the whole.
        edit: the edit, whose names are not looked up yet.
    """

    path: str
    edit: Edit


def read_tier(value: object, phase: str | None) -> tuple[Part, ...]:
    """The edits of one tier, in any of its forms.

    Args:
        value: an edit or its dict; a registered name; `(name, scale)`; what `read_hooks` takes;
            or a list of these, which may be empty.
        phase: "prompt" or "generated", to which the edits are narrowed; None: every token.

    Raises:
        SpecError: another form; or an edit that has another phase than the tier's.
    """
    if not isinstance(value, (list, tuple)) or _is_pair(value):
        return _read_one(value, phase)
    found: list[Part] = []
    for index, one in enumerate(value):
        with at(f"[{index}]"):
            parts = _read_one(one, phase)
        found.extend(Part(f"[{index}]{part.path}", part.edit) for part in parts)
    if len(found) > MAX_PARTS:
        raise SpecError("", f"at most {MAX_PARTS} edits can be in a tier, got {len(found)}")
    return tuple(found)


def read_hooks(value: object, phase: str | None) -> tuple[Part, ...]:
    """One Steer for each vector of `{hook point: {layer: vector}}` or `{layer: vector}`.

    Args:
        value: a dict in any form of `read_placed`. Hook points are `pre_attn`, `post_attn`,
            `post_block`, or any site's name; a vector may be `{"vector": …, "scale": …}`.
        phase: as `read_tier`.

    Raises:
        SpecError: as `read_placed`.
    """
    return tuple(
        Part(one.path, Steer(one.vector, one.layer, one.scale, one.site, phase=phase))
        for one in read_placed(value)
    )


def read_reference(value: object) -> Named:
    """A registered name: a Named, `name`, `(name, scale)` or `{"name": …, "scale": …}`.

    Raises:
        SpecError: another form, or no possible name.
    """
    if _is_pair(value):
        return Named(*value)  # type: ignore[misc]
    if not isinstance(value, (str, Named, Mapping)):
        raise SpecError("", f"expected {_REFERENCE}, got {kind(value)}")
    return Named.parse(value)


def narrowed(edit: Edit, phase: str | None) -> Edit:
    """The edit for the tokens of one phase only; None: for every token.

    Raises:
        SpecError: it has another phase, or its positions have no token of this one.
    """
    own = edit.positions.phase
    if own not in ("all", phase):
        for_whom = "every token" if phase is None else f'"{phase}" tokens'
        raise SpecError(
            "phase", f'"{own}" contradicts the tier, which is for {for_whom}; use `{own}`'
        )
    return edit if phase is None else changed(edit, phase=phase)


def changed(edit: Edit, **place: object) -> Edit:
    """The edit with another `positions` or `phase`; a Gate's are those of the edit within."""
    if isinstance(edit, Gate):
        return dataclasses.replace(edit, edit=edit.edit.replace(**place))
    return edit.replace(**place)


def _is_pair(value: object) -> bool:
    """Whether this is `(name, scale)`, which JSON makes a list of."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], numbers.Real)
    )


def _read_one(value: object, phase: str | None) -> tuple[Part, ...]:
    if isinstance(value, Edit):
        return (Part("", narrowed(value, phase)),)
    if isinstance(value, (str, Named)) or _is_pair(value):
        return (Part("", Steer(read_reference(value), phase=phase)),)
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected {_FORMS}, got {kind(value)}")
    if "op" in value:
        return (Part("", narrowed(parse_edit(value), phase)),)
    if "vector" in value:
        return (Part("", narrowed(Steer.parse(value), phase)),)
    if "name" in value:
        return (Part("", Steer(read_reference(value), phase=phase)),)
    return read_hooks(value, phase)
