"""Weights of small networks that scikit-learn or torch trained, read without importing either."""

from __future__ import annotations

from typing import Any

from midstream.errors import SpecError
from midstream.plan.classifiers.classes import Classes
from midstream.plan.classifiers.hidden import Hidden
from midstream.plan.classifiers.linear_classifier import name_of, names_of, steps_of, unscaled
from midstream.plan.classifiers.mlp import MLP
from midstream.validation import kind

_NETWORK = "MLPClassifier"
_LINEAR = "Linear"
_OF_TORCH = {"ReLU": "relu", "GELU": "gelu", "Tanh": "tanh", "SiLU": "silu"}


def is_network(classifier: object) -> bool:
    """Return whether a classifier, or the last step of a `Pipeline`, is an `MLPClassifier`."""
    return name_of(steps_of(classifier)[-1]) == _NETWORK


def read_network(classifier: object) -> dict[str, Any]:
    """Return the arguments of a probe that is a fitted `MLPClassifier`, scalers folded in: its
    log odds, or with more than two classes the logits of each.
    """
    import numpy as np

    *scalers, last = steps_of(classifier)
    model: Any = last
    if not hasattr(model, "coefs_"):
        raise SpecError("", f"`{_NETWORK}` is not fitted; call fit first")
    if len(model.coefs_) != 2:
        raise SpecError("", f"expected one hidden layer, got {len(model.coefs_) - 1}")
    if model.out_activation_ == "logistic" and model.coefs_[1].shape[1] > 1:
        raise SpecError("", "expected one class for each row, got several; fit one for each")
    if model.activation not in ("relu", "tanh"):
        raise SpecError("", f'expected activation "relu" or "tanh", got {model.activation!r}')
    (weights, output), (biases, last_bias) = model.coefs_, model.intercepts_
    rows, biases = unscaled(
        scalers, np.asarray(weights, np.float64).T, np.asarray(biases, np.float64)
    )
    output = np.asarray(output, np.float64).T
    if len(output) == 1:
        mlp = MLP(rows, biases, output[0], model.activation)
        return {"mlp": mlp, "bias": float(last_bias[0])}
    classes = Classes(output, last_bias, names_of(model.classes_))
    return {"hidden": Hidden(rows, biases, model.activation), "classes": classes}


def is_linear(module: object) -> bool:
    """Return whether a module is torch's `Linear`, or a `Sequential` of it and `Dropout`."""
    return [_class_of(layer) for layer in _layers(module)] == [_LINEAR]


def read_linear_module(module: object) -> tuple[Any, list[float]]:
    """Return the weights [n, width] and biases [n] of a `Linear`; see `is_linear`."""
    (linear,) = _layers(module)
    count = linear.out_features
    biases = [0.0] * count if linear.bias is None else linear.bias.detach().tolist()
    return linear.weight.detach(), biases


def read_module(module: object) -> dict[str, Any]:
    """Return the arguments of a probe that is an `nn.Sequential`; see `from_torch`."""
    parts = _layers(module) if _class_of(module) == "Sequential" else []
    names = [_class_of(layer) for layer in parts]
    if len(parts) != 3 or names[0] != _LINEAR or names[2] != _LINEAR or names[1] not in _OF_TORCH:
        raise SpecError(
            "",
            "expected an `nn.Sequential` of Linear, one of ReLU, GELU, Tanh and SiLU, and Linear, "
            f"or a Linear, got {kind(module)}{f' of {names}' if names else ''}",
        )
    first, activation, last = parts
    if names[1] == "GELU" and activation.approximate != "none":
        raise SpecError("", "expected GELU with the error function, got its approximation by tanh")
    hidden_bias = [0.0] * first.out_features if first.bias is None else first.bias
    word = _OF_TORCH[names[1]]
    if last.out_features > 1:
        hidden = Hidden(first.weight, hidden_bias, word)
        return {"hidden": hidden, "classes": Classes(last.weight, last.bias)}
    mlp = MLP(first.weight, hidden_bias, last.weight.reshape(-1), word)
    return {"mlp": mlp, "bias": 0.0 if last.bias is None else float(last.bias.detach())}


def _layers(module: Any) -> list[Any]:
    parts = module if _class_of(module) == "Sequential" else [module]
    return [layer for layer in parts if _class_of(layer) != "Dropout"]


def _class_of(value: object) -> str:
    """Return the name of torch's class of modules; "" of any other, subclasses included."""
    value_class = type(value)
    return value_class.__name__ if value_class.__module__.startswith("torch.nn.") else ""
