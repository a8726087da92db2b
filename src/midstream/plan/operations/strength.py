"""Edits with a multiple of their strength."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from midstream.errors import SpecError
from midstream.plan.operations.ablate import Ablate
from midstream.plan.operations.affine import Affine
from midstream.plan.operations.bias import Bias
from midstream.plan.operations.clamp import Clamp
from midstream.plan.operations.gate import Gate
from midstream.plan.operations.local import Edit, Local
from midstream.plan.operations.replace import Replace
from midstream.plan.operations.steer import Steer
from midstream.validation import at

# The field that a factor multiplies, where 0 changes nothing.
_FIELDS: dict[type, str] = {
    Ablate: "strength",
    Affine: "scale",
    Clamp: "strength",
    Replace: "alpha",
    Steer: "scale",
}


def with_strength(edits: Sequence[Edit], factor: float) -> tuple[Edit, ...]:
    """Return edits with a multiple of their strength; of factor 0 only Gates with memory."""
    if factor == 0 and not any(isinstance(edit, Gate) and edit.memory.emit() for edit in edits):
        return ()
    if factor == 1:
        return tuple(edits)
    return tuple(_scaled(edit, factor, index) for index, edit in enumerate(edits))


def _scaled(edit: Edit, factor: float, i: int) -> Edit:
    if isinstance(edit, Gate):
        inner = _scaled(edit.edit, factor, i)
        assert not isinstance(inner, Gate | Local)
        return dataclasses.replace(edit, edit=inner)
    with at("scale"):
        if isinstance(edit, Bias):
            return edit.replace(tokens={token: factor * value for token, value in edit.tokens})
        name = _FIELDS.get(type(edit))
        if name is None:
            raise SpecError(
                "",
                f"edits[{i}] is a {type(edit).__name__}, which has no strength to multiply; use "
                "0, 1, or give other `edits`",
            )
        return edit.replace(**{name: factor * getattr(edit, name)})
