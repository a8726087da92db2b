"""Edits that contain no other edit: all but `Gate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, get_args

from midstream.errors import SpecError
from midstream.plan.argument_names import other_argument
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
from midstream.validation import at, is_int, kind, listed, read_word, show

K = TypeVar("K")
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

PLAIN: dict[str, type[PlainEdit]] = {kind.op: kind for kind in get_args(PlainEdit)}


def read_kind(value: object, known: Mapping[str, type[K]]) -> type[K]:
    """Return the kind of an edit that a dict is, by its `op`, which determines the other fields."""
    if not isinstance(value, Mapping):
        problem = f"expected an edit, or a dict with `op`, got {kind(value)}"
        if callable(value):
            problem += "; a function is called by Local(fn, layer=14), in engines that allow it"
        if isinstance(value, str):
            problem += f"; registered vectors are an edit as Steer({show(value)})"
        else:
            example = "; write for example Steer(vector, layer=14), or (vector, 14)"
            problem += other_argument(value) or example
        raise SpecError("", f"{problem}; known: {listed(known)}")
    if "op" not in value:
        layers = value and all(is_int(layer) for layer in value)
        example = "; write Steer({layer: vector, …})" if layers else ""
        raise SpecError("", f"missing field `op`{example}; known: {listed(known)}")
    with at("op"):
        return known[read_word(value["op"], tuple(known))]
