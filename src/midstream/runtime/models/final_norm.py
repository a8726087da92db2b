"""The final norm of a loaded model, for vectors that are normed and decoded outside its forward."""

from __future__ import annotations

import ast
import inspect

from torch import nn

from midstream.errors import UnsupportedError
from midstream.runtime.models.decoder import find_layers
from midstream.runtime.models.forward_source import tree_of
from midstream.runtime.models.trunk_ends import NoEnd, find_norm


def find_final_norm(model: nn.Module) -> nn.Module:
    """Return the norm whose output the model's head reads.

    Args:
        model: the model of the runner.

    Raises:
        UnsupportedError: there is none that is known, it needs more than the stream, or the head
            reads something else than its output.
    """
    norm = find_norm(model, find_layers(model))
    if isinstance(norm, NoEnd):
        raise UnsupportedError(norm.reason)
    try:
        inspect.signature(norm.forward).bind(None)
    except TypeError as error:
        raise UnsupportedError(f"{type(norm).__qualname__} needs more than the stream") from error
    changed = _changed(model)
    if changed is not None:
        raise UnsupportedError(
            f"{type(model).__qualname__} gives its head {changed}, not the output of its norm"
        )
    return norm


def _changed(model: nn.Module) -> str | None:
    """Return what a model makes of its trunk's output, in code; None: it returns it as it is."""
    forward = tree_of(type(model).forward)
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
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            calls = [one for one in ast.walk(node) if _is_own_call(one)]
            if names & values or calls:
                return ast.unparse(node)
    return None


def _is_own_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.")
