"""Edits that contain no other edit: all but `Gate`."""

from __future__ import annotations

from midstream.errors import SpecError
from midstream.plan.operations.ablate import Ablate
from midstream.plan.operations.affine import Affine, LoReFT
from midstream.plan.operations.bias import Bias
from midstream.plan.operations.clamp import Clamp
from midstream.plan.operations.feature import Feature
from midstream.plan.operations.reconstruct import Reconstruct
from midstream.plan.operations.replace import Replace
from midstream.plan.operations.route import Route
from midstream.plan.operations.scale import Scale
from midstream.plan.operations.steer import Steer
from midstream.validation import kind, listed

PlainEdit = (
    Steer
    | Ablate
    | Clamp
    | Feature
    | Reconstruct
    | Affine
    | LoReFT
    | Replace
    | Scale
    | Route
    | Bias
)

KINDS: tuple[type[PlainEdit], ...] = (
    Steer,
    Ablate,
    Clamp,
    Feature,
    Reconstruct,
    Affine,
    LoReFT,
    Replace,
    Scale,
    Route,
    Bias,
)
PLAIN: dict[str, type[PlainEdit]] = {kind.op: kind for kind in KINDS}


def bad_edit(value: object, known: tuple[str, ...]) -> SpecError:
    """Return the error for a value that is no edit."""
    problem = f"expected an edit, or a dict with `op`, got {kind(value)}"
    if callable(value):
        problem += "; a function is called by Local(fn, layer=14), in engines that allow it"
    return SpecError("", f"{problem}; write for example Steer(vector, layer=14); {_ops(known)}")


def missing_op(known: tuple[str, ...]) -> SpecError:
    """Return the error for a dict without `op`."""
    return SpecError("", f"missing field `op`; {_ops(known)}")


def _ops(known: tuple[str, ...]) -> str:
    return f"known: {listed(known)}"
