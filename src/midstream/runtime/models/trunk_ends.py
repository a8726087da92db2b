"""The sites without a layer, read from the forward of the trunk, which has the list of layers."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from midstream.errors import UnsupportedError
from midstream.runtime.models.convention import LayerConvention
from midstream.runtime.models.forward_flow import path_of
from midstream.runtime.models.forward_source import attribute, decide, tree_of

_EMBED = ("embed_input_ids", "get_input_embeddings")
# What a value is: the embedding as a module returned it or the caller gave it, scaled, or with
# positions added to it; the output of the final norm, as `norm <path of the module>`.
_GIVEN, _SCALED, _SUMMED, _OTHER = "given", "scaled", "summed", "other"
_NORM, _MODULE = "norm ", "module "

_Values = dict[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class NoEnd:
    """A model without a site; the reason is a clause that can follow a colon."""

    reason: str


def find_end(
    site: str,
    model: nn.Module,
    layers: nn.ModuleList,
    convention: LayerConvention,
    embeds_given: bool,
) -> nn.Module | NoEnd | None:
    """Return the module whose output is `embed`, `final_norm` or `logits`, tapped at the norm;
    None: it is what the first layer gets. `convention` is that of the first or last layer.
    """
    if site != "embed":
        return find_norm(model, layers)
    trunk = _trunk_of(model, layers)
    try:
        return _embedding(trunk, layers, convention, embeds_given)
    except UnsupportedError as error:
        return NoEnd(f"{type(trunk).__qualname__} is not known to have it: {error}")


def find_norm(model: nn.Module, layers: nn.ModuleList) -> nn.Module | NoEnd:
    """Return the final norm of a loaded model with these layers."""
    trunk = _trunk_of(model, layers)
    try:
        walk = _Walk(trunk, layers)
    except UnsupportedError as error:
        return NoEnd(f"{type(trunk).__qualname__} is not known to have it: {error}")
    returned = {state for states in walk.returned for state in states}
    norms = {state for state in returned if state.startswith(_NORM)}
    if len(norms) != 1 or returned != norms:
        why = "what it returns is not the output of one norm"
        return NoEnd(f"{type(trunk).__qualname__} is not known to have it: {why}")
    norm: nn.Module = attribute(trunk, norms.pop().removeprefix(_NORM))
    return norm


def _trunk_of(model: nn.Module, layers: nn.ModuleList) -> nn.Module:
    return next(
        module for module in model.modules() if any(layers is child for child in module.children())
    )


def _embedding(
    trunk: nn.Module, layers: nn.ModuleList, convention: LayerConvention, embeds_given: bool
) -> nn.Module | None:
    states = _Walk(trunk, layers).into_layers
    if not states:
        raise UnsupportedError("its layers do not get what its embedding returns")
    modules = {state for state in states if state.startswith(_MODULE)}
    states -= modules
    if _OTHER in states:
        raise UnsupportedError("it changes the embeddings before the first layer")
    if _SUMMED not in states:
        if convention.no_pre:
            raise UnsupportedError(convention.no_pre)
        return None
    if states != {_SUMMED} or len(modules) != 1:
        raise UnsupportedError("it adds positions to embeddings that no one module returns")
    if embeds_given:
        raise UnsupportedError(
            "it adds positions to the embeddings, which it may be given with prompt_embeds or "
            "images; use resid_pre of layer 0"
        )
    embedding: nn.Module = attribute(trunk, modules.pop().removeprefix(_MODULE))
    return embedding


def _forward_of(cls: type) -> Any:
    """Return a trunk's forward; that of its parent where it only calls that, with its arguments."""
    for index, owner in enumerate(cls.__mro__):
        if "forward" not in vars(owner):
            continue
        function = vars(owner)["forward"]
        call = _super_call(tree_of(function))
        if call is None:
            return function
        later = (vars(base).get("forward") for base in cls.__mro__[index + 1 :])
        parent = next(forward for forward in later if forward is not None)
        names = list(inspect.signature(parent).parameters)[1:]
        arguments = [*zip(names, call.args, strict=False)]
        arguments += [(word.arg, word.value) for word in call.keywords if word.arg is not None]
        if any(not isinstance(value, ast.Name) or value.id != name for name, value in arguments):
            raise UnsupportedError("it changes what it gives to its parent's forward")
    raise UnsupportedError("it has no forward")


def _super_call(tree: ast.FunctionDef) -> ast.Call | None:
    """Return the call of a function that only returns `super().forward(…)`; else None."""
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    value = body[0].value if len(body) == 1 and isinstance(body[0], ast.Return) else None
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "super().forward":
        return value
    return None


class _Walk:
    """What the values of a trunk's forward are, statement by statement."""

    def __init__(self, trunk: nn.Module, layers: nn.ModuleList) -> None:
        if "forward" in vars(trunk):
            raise UnsupportedError("its forward was replaced")
        self._trunk = trunk
        self._list = next(name for name, child in trunk.named_children() if child is layers)
        function: Any = _forward_of(type(trunk))
        self._globals = function.__globals__
        self.into_layers: frozenset[str] = frozenset()  # of what the first layer is called with
        self.returned: list[frozenset[str]] = []  # after the layers, each
        self._passed = False
        self._nones: set[str] = set()  # names that are None
        self._block(tree_of(function).body, {"inputs_embeds": frozenset({_GIVEN})})
        if not self._passed:
            raise UnsupportedError("its forward has no loop over its layers")

    def _block(self, body: list[ast.stmt], values: _Values) -> _Values | None:
        """Run statements; None if they return or raise."""
        for statement in body:
            next_values = self._statement(statement, values)
            if next_values is None:
                return None
            values = next_values
        return values

    def _statement(self, node: ast.stmt, values: _Values) -> _Values | None:
        if isinstance(node, ast.Return | ast.Raise):
            if isinstance(node, ast.Return) and self._passed and node.value is not None:
                self._return(node.value, values)
            return None
        if isinstance(node, ast.If):
            return self._branches(node, values)
        if isinstance(node, ast.For | ast.While):
            return self._loop(node, values)
        if isinstance(node, ast.With):
            return self._block(node.body, values)
        self._nones -= _stored(node)
        if isinstance(node, ast.Assign):
            if isinstance(node.value, ast.Constant) and node.value.value is None:
                self._nones |= _stored(node)
            state = self._state(node.value, values)
            for target in node.targets:
                values = _assigned(target, state, values)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            values = _assigned(node.target, self._state(node.value, values), values)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            whole = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
            values = _assigned(node.target, self._state(whole, values), values)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            name = getattr(called.value, "id", "") if isinstance(called, ast.Attribute) else ""
            if values.get(name) and getattr(called, "attr", "").endswith("_"):
                values = {**values, name: frozenset({_OTHER})}
        return values

    def _branches(self, node: ast.If, values: _Values) -> _Values | None:
        # A branch that sets no embedding is another pipeline stage's, if one does.
        before, ends, nones, embedding = self._nones, [], [], []
        for body in self._taken(node):
            self._nones = set(before)
            block_values = self._block(body, dict(values))
            if block_values is not None:
                ends.append(block_values)
                nones.append(self._nones)
                stored = {name for statement in body for name in _stored(statement)}
                if any(block_values.get(name) for name in stored):
                    embedding.append(self._nones)
        if not ends:
            return None
        self._nones = set.intersection(*(embedding or nones))
        names = {name for end in ends for name in end}
        return {
            name: frozenset().union(*(end.get(name, frozenset()) for end in ends)) for name in names
        }

    def _taken(self, node: ast.If | ast.IfExp) -> list[Any]:
        """Return the branches that may be taken: one, if the condition is known."""
        known = decide(self._trunk, self._globals, node.test)
        both = [node.body, node.orelse]
        return both if known is None else [both[not known]]

    def _loop(self, node: ast.For | ast.While, values: _Values) -> _Values:
        if self._is_over_layers(node):
            if not self._passed:
                self.into_layers = self._given_to_first(node, values)
            self._passed = True
        self._nones -= _stored(node)
        # What a loop assigns is nothing that is looked for.
        stored = _stored(node)
        return {
            name: frozenset({_OTHER}) if name in stored else state for name, state in values.items()
        }

    def _is_over_layers(self, node: ast.For | ast.While) -> bool:
        over = node.iter if isinstance(node, ast.For) else node.test
        if any(
            path_of(child) == self._list for child in ast.walk(over) if isinstance(child, ast.expr)
        ):
            return True
        numbers = _stored(node.target) if isinstance(node, ast.For) else set()
        return any(
            self._is_a_layer(child) and getattr(child.slice, "id", "") in numbers
            for statement in node.body
            for child in ast.walk(statement)
            if isinstance(child, ast.Subscript)
        )

    def _is_a_layer(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Subscript) and path_of(node.value) == self._list

    def _given_to_first(self, loop: ast.For | ast.While, values: _Values) -> frozenset[str]:
        """Return what the first layer is called with in a loop over the layers."""
        layers = _stored(loop.target) if isinstance(loop, ast.For) else set()
        states: frozenset[str] = frozenset()
        nones = set(self._nones)
        for statement in loop.body:
            if _fails(statement, nones):
                continue  # a branch that is not taken before the first layer
            if isinstance(statement, ast.Assign) and self._is_a_layer(statement.value):
                layers |= _stored(statement)
            for node in ast.walk(statement):
                if not isinstance(node, ast.Call):
                    continue
                if self._is_a_layer(node.func) or getattr(node.func, "id", "") in layers:
                    arguments = (*node.args, *(word.value for word in node.keywords))
                    names = [arg.id for arg in arguments if isinstance(arg, ast.Name)]
                    states = states.union(*(values.get(name, frozenset()) for name in names))
            if states:
                return states
            stored = _stored(statement)
            nones -= stored
            values = {
                name: frozenset({_OTHER}) if name in stored and state else state
                for name, state in values.items()
            }
        return states

    def _return(self, value: ast.expr, values: _Values) -> None:
        called = value.func if isinstance(value, ast.Call) else None
        if getattr(called, "id", "") == "IntermediateTensors":
            return  # by a pipeline stage that is not the last one
        if isinstance(value, ast.Tuple) and value.elts:
            value = value.elts[0]  # with hidden states for a drafter
        self.returned.append(self._state(value, values) or frozenset({_OTHER}))

    def _state(self, node: ast.expr, values: _Values) -> frozenset[str]:
        """Return what a value is; empty: it has nothing to do with the embedding or the norm."""
        if isinstance(node, ast.Name):
            return values.get(node.id, frozenset())
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return self._state(node.value, values) if node.slice.value == 0 else frozenset()
        if isinstance(node, ast.IfExp):
            return frozenset().union(*(self._state(taken, values) for taken in self._taken(node)))
        if isinstance(node, ast.BinOp):
            return _combined(
                node.op, self._state(node.left, values), self._state(node.right, values)
            )
        if isinstance(node, ast.Call):
            return self._called(node, values)
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return frozenset({_OTHER} if any(self._state(child, values) for child in inner) else ())

    def _called(self, node: ast.Call, values: _Values) -> frozenset[str]:
        path = path_of(node.func)
        if path in _EMBED and not self._passed:
            return self._embedded(path)
        module = None if path is None else attribute(self._trunk, path)
        if isinstance(module, nn.Module):
            name = type(module).__name__.lower()
            if self._passed and "norm" in name:
                return frozenset({_NORM + str(path)})
            embeds = "embedding" in type(getattr(module, "base_layer", module)).__name__.lower()
            reads_tokens = any(getattr(argument, "id", "") == "input_ids" for argument in node.args)
            if not self._passed and embeds and reads_tokens:
                return frozenset({_GIVEN, _MODULE + str(path)})
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if isinstance(node.func, ast.Attribute):
            arguments.append(node.func.value)
        return frozenset(
            {_OTHER} if any(self._state(argument, values) for argument in arguments) else ()
        )

    def _embedded(self, name: str) -> frozenset[str]:
        function = getattr(type(self._trunk), name, None)
        body = tree_of(function).body
        if name in vars(self._trunk) or not isinstance(body[-1], ast.Return):
            raise UnsupportedError(f"its {name} cannot be followed")
        values: _Values = {}
        for statement in body[:-1]:
            values = self._statement(statement, values) or {}
        assert body[-1].value is not None
        return self._state(body[-1].value, values) or frozenset({_OTHER})


def _fails(branch: ast.stmt, nones: set[str]) -> bool:
    """Return whether an `if` runs nothing that can run while these names are None: it asserts that
    one is not, calculates with one, or joins it to others.
    """
    if not isinstance(branch, ast.If) or branch.orelse:
        return False
    nones = set(nones)
    for statement in branch.body:
        if not isinstance(statement, ast.Assign | ast.Assert | ast.Expr):
            return False
        for node in ast.walk(statement):
            if isinstance(node, ast.IfExp | ast.BoolOp | ast.Lambda):
                return False
            used: list[ast.expr] = []
            if isinstance(node, ast.BinOp):
                used = [node.left, node.right]
            elif isinstance(node, ast.Assert) and ast.unparse(node.test).endswith(" is not None"):
                used = [node.test.left] if isinstance(node.test, ast.Compare) else []
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.cat":
                used = [item for part in node.args[:1] for item in getattr(part, "elts", [])]
            if any(isinstance(name, ast.Name) and name.id in nones for name in used):
                return True
        nones -= _stored(statement)
    return False


def _stored(node: ast.AST) -> set[str]:
    return {
        child.id
        for child in ast.walk(node)
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store)
    }


def _combined(
    operator: ast.operator, left: frozenset[str], right: frozenset[str]
) -> frozenset[str]:
    """Return what the result of an operator is, of which at most one side is the embedding."""
    if not left and not right:
        return frozenset()
    whole = left | right
    modules = {state for state in whole if state.startswith(_MODULE)}
    if not (left and right) and _OTHER not in whole and not any(_is_norm(state) for state in whole):
        if isinstance(operator, ast.Mult | ast.Div) and _SUMMED not in whole:
            return frozenset({_SCALED})
        if isinstance(operator, ast.Add) and not whole & {_SUMMED, _SCALED}:
            return frozenset({_SUMMED, *modules})
    return frozenset({_OTHER})


def _is_norm(state: str) -> bool:
    return state.startswith(_NORM)


def _assigned(target: ast.expr, state: frozenset[str], values: _Values) -> _Values:
    if isinstance(target, ast.Tuple):
        # A norm that adds returns the stream too, second.
        other = frozenset({_OTHER} if state else ())
        for index, element in enumerate(target.elts):
            whole = not index and all(map(_is_norm, state))
            values = _assigned(element, state if whole else other, values)
        return values
    return {**values, target.id: state} if isinstance(target, ast.Name) else values
