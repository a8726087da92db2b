"""Sources of the forwards of a loaded model's modules, read with what their attributes are now."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

from torch import nn

from midstream.errors import UnsupportedError
from midstream.runtime.models.forward_flow import Flow, Names, path_of, read

_LAYERS = "vllm.model_executor.layers"
_UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class Types:
    """Classes of vLLM by which modules are recognised."""

    attention: type[nn.Module]
    latent: type[nn.Module]
    mixer: type  # everything with a KV cache or a state
    linear: type[nn.Module]
    column: type[nn.Module]  # their output is split over the ranks
    row: type[nn.Module]
    qkv: type[nn.Module]
    replicated: type[nn.Module]  # each rank has all of it
    rotary: type[nn.Module]
    experts: type[nn.Module]

    @staticmethod
    @functools.cache
    def of_vllm() -> Types:
        """Return the classes of the installed vLLM."""
        attention = importlib.import_module(f"{_LAYERS}.attention")
        linear = importlib.import_module(f"{_LAYERS}.linear")
        runner = importlib.import_module(f"{_LAYERS}.fused_moe.runner.moe_runner_interface")
        return Types(
            attention=attention.Attention,
            latent=attention.MLAAttention,
            mixer=importlib.import_module(f"{_LAYERS}.attention_layer_base").AttentionLayerBase,
            linear=linear.LinearBase,
            column=linear.ColumnParallelLinear,
            row=linear.RowParallelLinear,
            qkv=linear.QKVParallelLinear,
            replicated=linear.ReplicatedLinear,
            rotary=importlib.import_module(f"{_LAYERS}.rotary_embedding.base").RotaryEmbeddingBase,
            experts=runner.MoERunnerInterface,
        )


def attribute(module: object, path: str) -> Any:
    """Return the attribute at a dotted path; None if it is missing."""
    value = _attribute(module, path)
    return None if value is _UNKNOWN else value


def linear_at(owner: object, path: str, types: Types) -> Any:
    """Return the matrix at a path, which a LoRA layer may wrap; None if there is none."""
    module = attribute(owner, path)
    module = getattr(module, "base_layer", module)
    return module if isinstance(module, types.linear) else None


def flow_of(owner: nn.Module, name: str, types: Types) -> Flow:
    """Return the flow of the forward that calls a sub-module, or of its one method that does."""
    cls = type(owner)
    if "forward" in vars(owner):
        raise UnsupportedError("its forward was replaced")
    function: Any = inspect.getattr_static(cls, "forward", None)
    if not inspect.isfunction(function):
        raise UnsupportedError("its forward is no plain function")
    if not _calls(tree_of(function), name):
        used = sorted(_methods(tree_of(function)))
        within = [
            method
            for method_name in used
            if inspect.isfunction(method := inspect.getattr_static(cls, method_name, None))
            if _calls(tree_of(method), name)
        ]
        if len(within) != 1:
            raise UnsupportedError(f"its forward does not call its {name!r}")
        function = within[0]

    def kind(path: str) -> str | None:
        value = attribute(owner, path)
        if linear_at(owner, path, types) is not None or isinstance(value, types.attention):
            return "matrix"
        return "module" if isinstance(value, nn.Module) else None

    known = functools.partial(decide, owner, function.__globals__)
    return read(tree_of(function), Names(kind, known))


def check_called(layer: nn.Module, path: str) -> None:
    """Check that each module on a path is called by the one above it, as a module."""
    parent = layer
    for name in path.split("."):
        trees = [tree_of(method) for method in _own_methods(type(parent))]
        called = any(_calls(tree, name) for tree in trees)
        if not called or any(_uses_method(tree, name) for tree in trees):
            raise UnsupportedError(f"{type(parent).__qualname__} does not just call its {name!r}")
        parent = getattr(parent, name)


def calls(function: Any, name: str) -> bool:
    """Return whether a method calls the sub-module `name` of its object, under any condition."""
    return _calls(tree_of(function), name)


def number(owner: object, text: str) -> int | None:
    """Return the value of an expression of the module's attributes, such as `self.q_size`."""
    value = _evaluated(owner, {}, ast.parse(text, mode="eval").body)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def reads_quantised(owner: nn.Module, name: str) -> bool:
    """Return whether a matrix may be given an input that its caller has quantised already."""
    module = importlib.import_module(f"{_LAYERS}.fusion.quant_activation")
    return module.get_input_quant_key(getattr(owner, name)) is not None


@functools.cache
def tree_of(function: Any) -> ast.FunctionDef:
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise UnsupportedError("its source is not available") from error
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        raise UnsupportedError(f"its {getattr(function, '__name__', 'forward')} is decorated")
    return node


def _own_methods(cls: type) -> list[Any]:
    """The functions that a class and its bases in models define, but for constructors."""
    bases = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    return [
        item
        for base in bases
        for name, item in vars(base).items()
        if inspect.isfunction(item) and not name.startswith("__") and _is_plain(item)
    ]


def _is_plain(function: Any) -> bool:
    try:
        tree_of(function)
    except UnsupportedError:
        return False
    return True


@functools.cache
def _methods(tree: ast.AST) -> set[str]:
    """Names of the methods of `self` that a function calls."""
    return {
        path
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (path := path_of(node.func)) and "." not in path
    }


@functools.cache
def _calls(tree: ast.AST, name: str) -> bool:
    """Whether a function calls `self.<name>(…)`, also by a local name."""
    aliases = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp | ast.Attribute)
        for target in node.targets
        if isinstance(target, ast.Name)
        and any(
            path_of(child) == name for child in ast.walk(node.value) if isinstance(child, ast.expr)
        )
    }
    return any(
        isinstance(node, ast.Call)
        and (path_of(node.func) == name or getattr(node.func, "id", None) in aliases)
        for node in ast.walk(tree)
    )


@functools.cache
def _uses_method(tree: ast.AST, name: str) -> bool:
    return any(
        isinstance(node, ast.Call) and (path_of(node.func) or "").startswith(f"{name}.")
        for node in ast.walk(tree)
    )


def decide(owner: object, names: dict[str, Any], test: ast.expr) -> bool | None:
    """Return the value of a condition on the module's attributes; None if it depends on others."""
    value = _evaluated(owner, names, test)
    plain = isinstance(value, bool | int | float | str | nn.Module | None | list | tuple | dict)
    return bool(value) if plain and not isinstance(value, nn.ModuleList) else None


def _evaluated(owner: object, names: dict[str, Any], node: ast.expr) -> Any:
    path = path_of(node)
    if path is not None:
        return _attribute(owner, path)
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = decide(owner, names, node.operand)
        return _UNKNOWN if inner is None else not inner
    if isinstance(node, ast.BoolOp):
        values = [decide(owner, names, operand) for operand in node.values]
        ends = isinstance(node.op, ast.Or)
        if ends in values:
            return ends
        return _UNKNOWN if None in values else not ends
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compared(owner, names, node)
    if isinstance(node, ast.BinOp):
        left, right = (_evaluated(owner, names, operand) for operand in (node.left, node.right))
        if isinstance(left, int) and isinstance(right, int):
            if isinstance(node.op, ast.Mult):
                return left * right
            if isinstance(node.op, ast.FloorDiv) and right:
                return left // right
    if isinstance(node, ast.Call):
        return _called(owner, names, node)
    return _UNKNOWN


def _attribute(owner: object, path: str) -> Any:
    value: Any = owner
    for name in path.split("."):
        try:
            value = getattr(value, name, _UNKNOWN)
        except (AssertionError, LookupError, NotImplementedError, RuntimeError, ValueError):
            return _UNKNOWN  # a property that has no value here
    return value


def _compared(owner: object, names: dict[str, Any], node: ast.Compare) -> Any:
    left, right = (
        _evaluated(owner, names, operand) for operand in (node.left, node.comparators[0])
    )
    if left is _UNKNOWN or right is _UNKNOWN:
        return _UNKNOWN
    operator = node.ops[0]
    if isinstance(operator, ast.Is | ast.IsNot):
        return (left is right) == isinstance(operator, ast.Is)
    simple = int, float, str
    if not isinstance(operator, ast.Eq | ast.NotEq):
        return _UNKNOWN
    if not isinstance(left, simple) or not isinstance(right, simple):
        return _UNKNOWN
    return (left == right) == isinstance(operator, ast.Eq)


def _called(owner: object, names: dict[str, Any], node: ast.Call) -> Any:
    """Return the value of `current_platform.is_…()`, which stays the same."""
    function = node.func
    if isinstance(function, ast.Attribute) and not node.args and not node.keywords:
        platform = function.value
        if isinstance(platform, ast.Name) and platform.id == "current_platform":
            method = getattr(names.get(platform.id), function.attr, None)
            return method() if callable(method) and function.attr.startswith("is_") else _UNKNOWN
    return _UNKNOWN
