"""The arguments of a probe that is a classifier of scikit-learn or a module of torch."""

from __future__ import annotations

from typing import Any

from midstream.errors import SpecError
from midstream.plan.classifiers.classes import Classes
from midstream.plan.classifiers.linear_classifier import read_outputs
from midstream.plan.classifiers.trained_mlp import (
    is_linear,
    is_network,
    read_linear_module,
    read_module,
    read_network,
)
from midstream.plan.selection import Layers


def of_sklearn(classifier: object, layer: Any) -> dict[str, Any]:
    """Return the arguments, but for the location, that make a probe a fitted classifier."""
    if is_network(classifier):
        return read_network(classifier)
    weights, biases, names = read_outputs(classifier)
    if len(weights) > 1:
        return {"classes": Classes(weights, biases, names)}
    layers = Layers("all") if layer is None else Layers.parse(layer)
    count = 1 if layers.indices == "all" else len(layers.indices)
    if weights.size % count:
        raise SpecError("", f"it has {weights.size} weights, which {count} layers cannot share")
    rows = weights[0] if count == 1 else weights.reshape(count, -1)
    return {"direction": rows, "bias": float(biases[0])}


def of_torch(module: object) -> dict[str, Any]:
    """Return the arguments, but for the location, that make a probe a module."""
    if is_linear(module):
        weights, biases = read_linear_module(module)
        if len(weights) > 1:
            return {"classes": Classes(weights, biases)}
        return {"direction": weights[0], "bias": float(biases[0])}
    return read_module(module)
