"""The final norm of a loaded model, for vectors that are normed and decoded outside its forward."""

from __future__ import annotations

import ast
import copy
import inspect

import torch
from torch import Tensor, nn

from midstream.errors import UnsupportedError
from midstream.runtime.models.decoder import find_layers
from midstream.runtime.models.forward_source import tree_of
from midstream.runtime.models.trunk_ends import NoEnd, find_norm

# Of the norm of the result: what is added to the mean square, and rounding.
_SLACK = 1e-3


def find_final_norm(model: nn.Module) -> nn.Module:
    """Return the norm whose output the model's head reads."""
    norm = find_norm(model, find_layers(model))
    if isinstance(norm, NoEnd):
        raise UnsupportedError(norm.reason)
    try:
        inspect.signature(norm.forward).bind(None)
    except TypeError as error:
        raise UnsupportedError(f"{type(norm).__qualname__} needs more than the stream") from error
    why = why_no_head(model)
    if why:
        raise UnsupportedError(why)
    return norm


def gain_of(norm: nn.Module, width: int, device: torch.device) -> tuple[Tensor, bool]:
    """Return the weights γ of a norm, float64 [width], up to a factor near 1, and whether it
    subtracts the mean: read from what it makes of a few vectors, as classes store γ differently.
    """
    exact = copy.deepcopy(norm).float()
    call = getattr(exact, "forward_native", exact.forward)

    def normed(x: Tensor) -> Tensor:
        with torch.no_grad():
            output: Tensor = call(x.float()[None])[0].double()
        return output

    # Of mean 0 and of mean square 1, whatever the norm divides by.
    signs = torch.ones(width, dtype=torch.float64, device=device)
    signs[1::2] = -1
    up, down = normed(signs), normed(-signs)
    gain, bias = (up - down) / 2 * signs, (up + down) / 2
    other = torch.linspace(-1, 3, width, dtype=torch.float64, device=device) + 0.5 * signs
    actual = normed(other)
    for is_centred in (False, True):
        x = other - other.mean() if is_centred else other
        wanted = gain * x / x.square().mean().sqrt() + bias
        if float((actual - wanted).norm()) <= _SLACK * float(wanted.norm()):
            return gain, is_centred
    raise UnsupportedError(
        f"{type(norm).__qualname__} is neither an RMSNorm nor a LayerNorm, so that no direction of "
        "the stream is known for a token"
    )


def why_no_head(model: nn.Module) -> str:
    """Return why a model's head does not read its final norm's output as it is; empty: it does."""
    changed = _changed(tree_of(type(model).forward))
    if changed is None:
        return ""
    return f"{type(model).__qualname__} gives its head {changed}, not the output of its norm"


def _changed(forward: ast.FunctionDef) -> str | None:
    """Return what a forward makes of its trunk's output, in code; None: it returns it as it is."""
    values = {
        name.id
        for node in ast.walk(forward)
        if isinstance(node, ast.Assign) and _is_own_call(node.value)
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    for node in ast.walk(forward):
        if isinstance(node, ast.BinOp):
            names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            calls = [call for call in ast.walk(node) if _is_own_call(call)]
            if names & values or calls:
                return ast.unparse(node)
        if isinstance(node, ast.AugAssign) and getattr(node.target, "id", "") in values:
            return ast.unparse(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = node.value.func
            on = getattr(function.value, "id", "") if isinstance(function, ast.Attribute) else ""
            if on in values and ast.unparse(function).endswith("_"):
                return ast.unparse(node)
    return None


def _is_own_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.")
