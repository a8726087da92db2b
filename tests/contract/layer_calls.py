"""Calls of sub-modules in the sources of decoder layers: what they are given and return."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.sources import (
    class_node,
    class_texts,
    each_convention,
    family_of,
    forward_of,
    unparse,
)
from support.syntax import tree_of, walk

from midstream.runtime.models.convention import Input, LayerConvention, Output

# What changes no value: in evaluation, and (the last two) wherever the table has no refusal.
NEUTRAL = ("dropout", "view", "_cast_for_residual", "sp_reduce_scatter")


def methods(path: Path, node: ast.ClassDef, dotted: str) -> Iterator[ast.FunctionDef]:
    """The methods that may call a sub-module: the layer's, or any of the file's for one deeper."""
    names = class_texts(path) if "." in dotted else ()
    others = [found for name in names if (found := class_node(path, name))]
    for owner in others or [node]:
        yield from (
            item
            for item in owner.body
            if isinstance(item, ast.FunctionDef) and item.name != "__init__"
        )


def statements(body: list[ast.stmt], beside: ast.stmt | None = None) -> Iterator[ast.stmt]:
    """The simple statements in the order of the source; of an `if` around `beside`, only the
    branch which that is in.
    """
    for item in body:
        inner = [part for part in (getattr(item, "body", []), getattr(item, "orelse", [])) if part]
        taken = [part for part in inner if any(beside in walk(each) for each in part)]
        for part in taken or inner:
            yield from statements(part, beside)
        if not inner:
            yield item


def calls(item: ast.AST, attribute: str, aliases: set[str]) -> list[ast.Call]:
    """Calls of `self.<attribute>`, also under a local name, also by a fused all-reduce."""
    found = []
    for call in walk(item):
        if not isinstance(call, ast.Call):
            continue
        function = unparse(call.func)
        fused = function.startswith("fused_allreduce_") and f"self.{attribute}" in map(
            unparse, call.args
        )
        if function == f"self.{attribute}" or function in aliases or fused:
            found.append(call)
    return found


def aliases_of(lines: list[ast.stmt], attribute: str) -> set[str]:
    """Local names of `self.<attribute>`, as in `ffn = self.moe if self.is_moe else self.mlp`."""
    return {
        unparse(line.targets[0])
        for line in lines
        if isinstance(line, ast.Assign)
        and isinstance(line.value, (ast.IfExp, ast.Attribute))
        and any(unparse(part) == f"self.{attribute}" for part in walk(line.value))
    }


Calls = Iterator[tuple[ast.FunctionDef, list[ast.stmt], int, ast.Call]]


def each_call(path: Path, node: ast.ClassDef, dotted: str) -> Calls:
    """(method, its statements, the number of the one that calls, the call)."""
    return iter(_all_calls(path if "." in dotted else Path(), node, dotted))


@functools.cache
def _all_calls(path: Path, node: ast.ClassDef, dotted: str) -> list[Any]:
    return list(_each_call(path, node, dotted))


def _each_call(path: Path, node: ast.ClassDef, dotted: str) -> Calls:
    attribute = dotted.rpartition(".")[2]
    for method in methods(path, node, dotted):
        lines = list(statements(method.body))
        aliases = aliases_of(lines, attribute)
        for line in lines:
            for call in calls(line, attribute, aliases):
                near = list(statements(method.body, line))
                yield method, near, near.index(line), call


def loads(item: ast.AST, name: str) -> int:
    return sum(
        isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Load)
        for part in walk(item)
    )


def stores(item: ast.stmt, name: str) -> bool:
    return any(
        isinstance(part, ast.Name) and part.id == name and isinstance(part.ctx, ast.Store)
        for part in walk(item)
    )


def is_fresh(
    method: ast.FunctionDef, lines: list[ast.stmt], number: int, given: ast.expr | None
) -> bool:
    """Whether nobody else reads the tensor that the call of statement `number` is given."""
    if not isinstance(given, ast.Name):
        return isinstance(given, (ast.Call, ast.BinOp))
    # What is cut to fewer rows of itself is the same value, and `empty_like` reads no value.
    same = f"{given.id} = {given.id}[", f"attn_output = torch.empty_like({given.id}"
    cut = [unparse(line).startswith(same) for line in lines]
    before = [n for n, line in enumerate(lines[:number]) if stores(line, given.id) and not cut[n]]
    if not before:
        # A method of the layer's own that is given what the norm returned.
        return method.name.startswith("_")
    made = lines[before[-1]]
    value = made.value if isinstance(made, ast.Assign) else None
    if isinstance(value, ast.Tuple):
        value = value.elts[0]
    if isinstance(value, ast.Subscript):
        value = value.value
    if not isinstance(value, (ast.Call, ast.BinOp)):
        return False
    between = sum(loads(lines[n], given.id) for n in range(before[-1] + 1, number) if not cut[n])
    rest = loads(lines[number], given.id) - 1
    if not stores(lines[number], given.id):
        for line in lines[number + 1 :]:
            rest += loads(line, given.id)
            if stores(line, given.id):
                break
    return between + rest == 0


def given_to(
    call: ast.Call, lines: list[ast.stmt], place: Input, forwards: list[list[str]]
) -> ast.expr | None:
    """The tensor at `place` in a call; None if the call does not have it there.

    Args:
        call: of the module.
        lines: the statements around it.
        place: where the table says it is.
        forwards: the parameters of the forward of each class that the module may have.
    """
    if place.parameter is None:
        return call.args[0] if call.args else None
    for keyword in call.keywords:
        if keyword.arg == place.parameter:
            return keyword.value
        if keyword.arg is None:  # `**kwargs`, a dict of the method's own
            for item in (part for line in lines for part in walk(line)):
                keys = item.keys if isinstance(item, ast.Dict) else []
                names = [key.value for key in keys if isinstance(key, ast.Constant)]
                if isinstance(item, ast.Dict) and place.parameter in names:
                    return item.values[names.index(place.parameter)]
    found = {each.index(place.parameter) for each in forwards if place.parameter in each}
    if len(found) != 1 or any(place.parameter not in each for each in forwards):
        return None
    index = found.pop()
    return call.args[index] if index < len(call.args) else None


@functools.cache
def attention_forwards(path: Path, node: ast.ClassDef) -> list[list[str]]:
    """The parameters of the forwards of the attention classes that a layer's class names."""
    names = {
        part.id
        for item in family_of(path, node)
        for part in walk(item)
        if isinstance(part, ast.Name) and "Attention" in part.id
    }
    found = [_forward_named(path, name) for name in sorted(names)]
    return [[each.arg for each in one.args.args][1:] for one in found if one]


def _forward_named(path: Path, name: str) -> ast.FunctionDef | None:
    """The forward of a class, or of a base, that the module or one beside it defines."""
    node = class_node(path, name)
    if node is None:
        imports = (item for item in tree_of(path).body if isinstance(item, ast.ImportFrom))
        homes = [
            path.with_name(f"{(item.module or '').rpartition('.')[2]}.py")
            for item in imports
            if name in [alias.name for alias in item.names]
        ]
        return _forward_named(homes[0], name) if homes and homes[0].exists() else None
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    found = (_forward_named(path, base) for base in bases)
    return forward_of(node) or next((one for one in found if one), None)


def is_added(lines: list[ast.stmt], number: int, call: ast.Call) -> bool:
    """Whether what the call returns, or the first item of that, is added to something as it is."""
    name, line = "", lines[number]
    wrapped = any(
        isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add) and call in walk(part)
        for part in walk(line)
    )
    if wrapped or isinstance(line, ast.Return):
        return True
    for later in lines[number:]:
        if isinstance(later, ast.AugAssign) and unparse(later.target) == name:
            return isinstance(later.op, ast.Add)
        if name and loads(later, name):
            text = unparse(later)
            scaled = [
                part
                for part in walk(later)
                if isinstance(part, ast.BinOp)
                and isinstance(part.op, ast.Mult)
                and loads(part, name)
            ]
            if scaled:
                return False
            if any(
                isinstance(part, ast.BinOp) and isinstance(part.op, ast.Add) and loads(part, name)
                for part in walk(later)
            ):
                return True
            if f"({name}, residual" in text:  # a fused norm adds first
                return True
            passes = any(word in text for word in NEUTRAL) or text.endswith(f"= {name}")
            if not passes and not text.endswith((f"= {name}[0]", "is not None")):
                return False
        if later is line or (name and loads(later, name)):
            if not isinstance(later, ast.Assign):
                return False
            target = later.targets[0]
            target = target.elts[0] if isinstance(target, ast.Tuple) else target
            name = unparse(target)
    return False


def places(
    *kinds: type,
) -> Iterator[tuple[str, str, Path, ast.ClassDef, LayerConvention, Input | Output]]:
    for name, path, node, convention in each_convention():
        for site, place in convention.branches.items():
            if isinstance(place, kinds):
                yield f"{name} {site}", site, path, node, convention, place
