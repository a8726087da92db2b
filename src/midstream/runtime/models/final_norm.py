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
    why = why_no_head(model)
    if why:
        raise UnsupportedError(why)
    return norm


def why_no_head(model: nn.Module) -> str:
    """Return why the head of a model does not read the output of its final norm as it is; empty:
    it does.

    Raises:
        UnsupportedError: the model's forward cannot be read.
    """
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
            names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            calls = [one for one in ast.walk(node) if _is_own_call(one)]
            if names & values or calls:
                return ast.unparse(node)
    return None


def _is_own_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.")
