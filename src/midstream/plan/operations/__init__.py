"""Edits: interventions on a token's vector, as immutable values."""

from __future__ import annotations

from collections.abc import Mapping

from midstream.errors import SpecError
from midstream.plan.operations.ablate import Ablate
from midstream.plan.operations.affine import Affine, LoReFT
from midstream.plan.operations.bias import Bias
from midstream.plan.operations.clamp import Clamp
from midstream.plan.operations.feature import Feature
from midstream.plan.operations.gate import Gate
from midstream.plan.operations.gate_probe import Reading
from midstream.plan.operations.local import Edit, Local
from midstream.plan.operations.named_edits import bind_edit, expand_edits, fill_edit, has_captured
from midstream.plan.operations.plain import PLAIN, PlainEdit, read_kind
from midstream.plan.operations.reconstruct import Reconstruct
from midstream.plan.operations.replace import Replace
from midstream.plan.operations.route import Route
from midstream.plan.operations.scale import Scale
from midstream.plan.operations.steer import Steer, in_full, is_placed_vector
from midstream.validation import listed

# The edits with a JSON form. A function has none, so that none is ever read from a network.
KINDS_BY_OP: dict[str, type[PlainEdit | Gate]] = {**PLAIN, Gate.op: Gate}
OPS: tuple[str, ...] = tuple(KINDS_BY_OP)

__all__ = [
    "KINDS_BY_OP",
    "OPS",
    "Ablate",
    "Affine",
    "Bias",
    "Clamp",
    "Edit",
    "Feature",
    "Gate",
    "LoReFT",
    "Local",
    "PlainEdit",
    "Reading",
    "Reconstruct",
    "Replace",
    "Route",
    "Scale",
    "Steer",
    "bind_edit",
    "expand_edits",
    "fill_edit",
    "has_captured",
    "in_full",
    "is_placed_vector",
    "parse_edit",
]


def parse_edit(value: object) -> Edit:
    """Read an edit, its dict with `op`, or a short form, see `in_full`."""
    if isinstance(value, Edit):
        return value
    value = in_full(value)
    if isinstance(value, Edit):
        return value
    if isinstance(value, Mapping) and value.get("op") == Local.op:
        problem = "functions run only where they are given in Python, as Local(fn, layer=14)"
        raise SpecError("op", f"{problem}; {listed(OPS)} have a JSON form")
    return read_kind(value, KINDS_BY_OP).parse(value)
