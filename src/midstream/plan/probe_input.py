"""What a probe reads: a direction, a network, classes, heads or attention."""

from __future__ import annotations

from typing import Any

from midstream.errors import SpecError
from midstream.plan.classifiers.attention_pool import AttentionPool
from midstream.plan.classifiers.classes import Classes
from midstream.plan.classifiers.mlp import MLP
from midstream.plan.readouts.attention import Entropy, Mass, read_reduction
from midstream.plan.vectors.matrix import is_matrix
from midstream.plan.vectors.named_vector import read_direction
from midstream.plan.vectors.row_per_layer import is_by_layer, read_per_layer
from midstream.validation import at, listed


def read_readings(layer: Any, **readings: Any) -> tuple[dict[str, Any], Any]:
    """Return what a probe reads by name, of which one is not None, and the layers, which a
    direction may name.
    """
    _check_readings(**readings)
    direction = readings["direction"]
    if direction is not None and (is_by_layer(direction) or is_matrix(direction)):
        rows, layer = read_per_layer("direction", direction, layer)
        return {**dict.fromkeys(readings), "direction": rows}, layer
    values: dict[str, Any] = {}
    for name, value in readings.items():
        with at(name):
            values[name] = None if value is None else _READERS[name](value)
    return values, layer


def _check_readings(**readings: object) -> None:
    words = [word for word, value in readings.items() if value is not None]
    if len(words) == 1:
        return
    problem = f"missing: give one of {listed(readings)}"
    if words:
        problem = f"a probe has one of {listed(readings)}; use one probe for each"
    raise SpecError(words[-1] if words else "direction", problem)


def _read_attention(value: object) -> Mass | Entropy:
    reduction = read_reduction(value)
    if isinstance(reduction, (Mass, Entropy)):
        return reduction
    raise SpecError(
        "",
        "a probe reads one number for each head: Mass(positions) or Entropy(); for others use "
        "Attention(…), given as `capture`",
    )


_READERS: dict[str, Any] = {
    "direction": read_direction,
    "mlp": MLP.parse,
    "classes": Classes.parse,
    "attention_pool": AttentionPool.parse,
    "attention": _read_attention,
}
