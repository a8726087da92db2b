"""Which sub-modules a module's forward calls, and with what, read from its source. It never
guesses: the unknown becomes part of a value's history (`Value.through`); a loop is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from midstream.errors import UnsupportedError

# What gives the same numbers by head in the same order.
VIEWS = frozenset(
    ("view", "reshape", "contiguous", "flatten", "unflatten", "view_as", "squeeze", "unsqueeze")
)
# What changes each number by itself, or its dtype.
_BY_NUMBER = frozenset(("to", "float", "type_as", "clamp", "clamp_", "mul_", "sigmoid"))
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div)
# What is said about a tensor without reading it.
_ABOUT = frozenset(("shape", "dtype", "device", "size", "dim", "numel", "ndim"))

# A function of vLLM's that splits `(q_norm, k_norm, qkv, q_size, kv_size)` and norms q and k.
NORMED_SPLIT = "MiniMaxText01RMSNormTP.forward_qkv"
# Methods that a module's call ends in.
_FORWARDS = ("forward", "forward_native", "forward_cuda")


@dataclass(frozen=True, slots=True)
class OutputPart:
    """What a module returned, or columns of it."""

    path: str
    index: int | None = None  # of the piece if the columns were split; None: all of them
    sizes: tuple[str, ...] | int | None = None  # widths, as expressions of `self`, or how many


@dataclass(frozen=True, slots=True)
class Trace:
    """How one part reached a value."""

    part: OutputPart
    changed: bool = False  # the numbers may differ from the part's
    through: frozenset[str] = frozenset()  # paths of modules, and `name()` of functions


@dataclass(frozen=True, slots=True)
class Value:
    """What a tensor is made of: how each part reached it; none for what no matrix returned."""

    traces: frozenset[Trace] = frozenset()

    @property
    def parts(self) -> frozenset[OutputPart]:
        """Return what it is made of."""
        return frozenset(trace.part for trace in self.traces)

    @property
    def through(self) -> frozenset[str]:
        """Return all that any of its parts went through."""
        return frozenset().union(*(trace.through for trace in self.traces))

    def of(self, path: str) -> Value:
        return Value(frozenset(trace for trace in self.traces if trace.part.path == path))

    def joined(self, *others: Value) -> Value:
        return Value(self.traces.union(*(value.traces for value in others)))

    def after(self, *through: str) -> Value:
        """Return this value after functions that changed its numbers."""
        traces = (Trace(trace.part, True, trace.through.union(through)) for trace in self.traces)
        return Value(frozenset(traces))


NOTHING = Value()


@dataclass(frozen=True, slots=True)
class FlowCall:
    """A call of a sub-module; an argument is None for the constant None."""

    path: str
    args: tuple[Value | None, ...]
    kwargs: dict[str, Value | None]

    def argument(self, index: int, name: str) -> Value | None:
        """Return an argument; None if it is None or missing."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[index] if index < len(self.args) else None


@dataclass(slots=True)
class Flow:
    """What a forward does with its sub-modules."""

    calls: list[FlowCall] = field(default_factory=list)  # in the order of the source
    bypassed: set[str] = field(default_factory=set)  # used otherwise than by a call
    functions: set[str] = field(default_factory=set)  # other ones that are called

    def of(self, path: str) -> list[FlowCall]:
        return [call for call in self.calls if call.path == path]


@dataclass(frozen=True, slots=True)
class Names:
    """What the reader is told about the attributes of the module that it reads."""

    # By the path of an attribute: "matrix", whose output is a part (linear layers and attention),
    # "module" or None.
    kind: Callable[[str], str | None]
    # The value of the condition of an `if`; None if only the forward pass knows.
    decide: Callable[[ast.expr], bool | None] = lambda test: None


def read(function: ast.FunctionDef, names: Names) -> Flow:
    """Return what a forward does with its sub-modules."""
    reader = _Reader(names)
    reader.run(function.body, {})
    return reader.flow


def path_of(node: ast.expr) -> str | None:
    """Return the dotted path of an attribute of `self`; None for another expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and node.id == "self" and names:
        return ".".join(reversed(names))
    return None


_Env = dict[str, Value]


class _Reader:
    def __init__(self, names: Names) -> None:
        self._names = names
        self.flow = Flow()

    def run(self, body: Sequence[ast.stmt], env: _Env) -> bool:
        """Follow statements, which change `env`; return whether what comes after is reached."""
        for item in body:
            if isinstance(item, ast.Return):
                if item.value is not None:
                    self._value(item.value, env)
                return False
            if isinstance(item, ast.Raise):
                return False
            if isinstance(item, ast.If):
                if not self._branch(item, env):
                    return False
            else:
                self._statement(item, env)
        return True

    def _branch(self, item: ast.If, env: _Env) -> bool:
        decided = self._names.decide(item.test)
        if decided is not None:
            return self.run(item.body if decided else item.orelse, env)
        self._value(item.test, env)
        ends = []
        for body in (item.body, item.orelse):
            inner = dict(env)
            if self.run(body, inner):
                ends.append(inner)
        if not ends:
            return False
        names = {name for end in ends for name in end}
        env.update({n: NOTHING.joined(*(end[n] for end in ends if n in end)) for n in names})
        return True

    def _statement(self, item: ast.stmt, env: _Env) -> None:
        if isinstance(item, ast.Assign) and len(item.targets) == 1:
            self._assign(item.targets[0], item.value, env)
        elif isinstance(item, ast.AnnAssign):
            if item.value is not None:
                self._assign(item.target, item.value, env)
        elif isinstance(item, ast.AugAssign):
            value = self._value(item.value, env).joined(self._value(item.target, env)).after()
            self._store(item.target, value, env)
        elif isinstance(item, ast.Expr):
            self._effect(item.value, env)
        elif not isinstance(item, ast.Assert | ast.Delete | ast.Pass | ast.Import | ast.ImportFrom):
            raise UnsupportedError(f"its forward has a {type(item).__name__.lower()} statement")

    def _effect(self, node: ast.expr, env: _Env) -> None:
        """Follow a statement that is one expression: a call may change what it is given."""
        self._value(node, env)
        if isinstance(node, ast.Call):
            name = _called(node)
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            if isinstance(node.func, ast.Attribute):
                arguments.append(node.func.value)
            for part in arguments:
                if isinstance(part, ast.Name) and part.id in env:
                    by_number = name in _BY_NUMBER
                    env[part.id] = env[part.id].after(*(() if by_number else (f"{name}()",)))

    def _assign(self, target: ast.expr, value: ast.expr, env: _Env) -> None:
        if not isinstance(target, ast.Tuple | ast.List):
            self._store(target, self._value(value, env), env)
            return
        if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            parts = [self._value(element, env) for element in value.elts]
        else:
            parts = self._unpacked(target, value, env)
        for name, part in zip(target.elts, parts, strict=True):
            self._store(name, part, env)

    def _unpacked(self, target: ast.Tuple | ast.List, value: ast.expr, env: _Env) -> list[Value]:
        whole = self._value(value, env)
        count = len(target.elts)
        if not isinstance(value, ast.Call):
            return [whole.after("unpacking()")] * count
        kind = self._kind(value.func)
        if kind == "matrix":  # (output, bias)
            return [whole] + [NOTHING] * (count - 1)
        pieces = self._pieces(value, env, count)
        if pieces:
            return pieces
        # `q, k = self.rotary_emb(positions, q, k)`: what has the same name is the same vector.
        arguments = {_vector_name(argument) for argument in value.args}
        wanted = [element.id if isinstance(element, ast.Name) else "" for element in target.elts]
        if {name for name in wanted if name != "_"} <= arguments:
            path = path_of(value.func) or ""
            above, _, last = path.rpartition(".")
            if last in _FORWARDS and self._names.kind(above) == "module":
                kind, path = "module", above
            through = path if kind else f"{_called(value)}()"
            return [env.get(name, NOTHING).after(through) for name in wanted]
        return [whole.after("unpacking()")] * count

    def _pieces(self, call: ast.Call, env: _Env, count: int) -> list[Value]:
        """Return the pieces of `x.split([…], dim=-1)` or `x.chunk(n, dim=-1)`; none for others."""
        split = _split(call, count)
        if split is None:
            return []
        tensor, sizes = split
        whole = self._value(tensor, env)
        parts = list(whole.parts)
        if len(parts) != 1 or parts[0].index is not None:
            return []
        pieces = [OutputPart(parts[0].path, index, sizes) for index in range(count)]
        return [
            Value(frozenset(replace(trace, part=piece) for trace in whole.traces))
            for piece in pieces
        ]

    def _store(self, target: ast.expr, value: Value, env: _Env) -> None:
        if isinstance(target, ast.Name):
            env[target.id] = value
            return
        inner = target
        while isinstance(inner, ast.Subscript | ast.Attribute):
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id != "self":
            env[inner.id] = env.get(inner.id, NOTHING).joined(value).after("[]=()")

    def _value(self, node: ast.expr, env: _Env) -> Value:
        if isinstance(node, ast.Name):
            return env.get(node.id, NOTHING)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, env)
        if isinstance(node, ast.Call):
            return self._call(node, env)
        if isinstance(node, ast.Subscript):
            inner = self._value(node.value, env)
            first = ast.unparse(node.slice) == "0" and isinstance(node.value, ast.Call)
            if first and isinstance(node.value, ast.Call) and self._kind(node.value.func):
                return inner  # `self.o_proj(x)[0]`
            return inner.after("[]()")
        if isinstance(node, ast.IfExp):
            decided = self._names.decide(node.test)
            if decided is not None:
                return self._value(node.body if decided else node.orelse, env)
        if isinstance(node, ast.Lambda | ast.GeneratorExp | ast.ListComp | ast.DictComp):
            raise UnsupportedError(f"its forward has a {type(node).__name__}")
        inner_nodes = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        values = [self._value(inner_node, env) for inner_node in inner_nodes]
        joined = NOTHING.joined(*values)
        if isinstance(node, ast.Tuple | ast.Starred):
            return joined
        if isinstance(node, ast.BinOp) and not isinstance(node.op, _ARITHMETIC):
            return joined.after("operator()")  # a matrix product
        return joined.after()

    def _attribute(self, node: ast.Attribute, env: _Env) -> Value:
        path = path_of(node)
        if path is None:
            inner = self._value(node.value, env)
            return NOTHING if node.attr in _ABOUT else inner.after(f".{node.attr}()")
        names = path.split(".")
        for count in range(1, len(names) + 1):
            if self._names.kind(".".join(names[:count])) == "matrix":
                self.flow.bypassed.add(".".join(names[:count]))
        return NOTHING

    def _kind(self, function: ast.expr) -> str | None:
        path = path_of(function)
        return None if path is None else self._names.kind(path)

    def _call(self, node: ast.Call, env: _Env) -> Value:
        name, kind = _called(node), self._kind(node.func)
        args = [self._argument(arg, env) for arg in node.args]
        kwargs = {
            keyword.arg or "**": self._argument(keyword.value, env) for keyword in node.keywords
        }
        inputs = NOTHING.joined(
            *(value for value in (*args, *kwargs.values()) if value is not None)
        )
        if kind is not None:
            path = path_of(node.func) or ""
            self.flow.calls.append(FlowCall(path, tuple(args), kwargs))
            if kind == "matrix":
                return Value(frozenset({Trace(OutputPart(path))}))
            return inputs.after(path)
        of = NOTHING
        path = path_of(node.func) or ""
        above, _, last = path.rpartition(".")
        if last in _FORWARDS and self._names.kind(above) == "module":
            return inputs.after(above)
        if isinstance(node.func, ast.Attribute):
            of = self._value(node.func.value, env)
            if of.parts and name in _ABOUT:
                return NOTHING
            if of.parts and name in VIEWS:
                return of
            if of.parts and name in _BY_NUMBER:
                return of.joined(inputs).after()
            if path_of(node.func):
                self._attribute(node.func, env)
        self.flow.functions.add(name)
        # What is handed to a function is a module of the forward's own: it went through that too.
        modules = [path_of(arg) for arg in node.args]
        inner = [module for module in modules if module and self._names.kind(module) == "module"]
        return of.joined(inputs).after(f"{name}()", *inner)

    def _argument(self, node: ast.expr, env: _Env) -> Value | None:
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        return self._value(node, env)


def _split(call: ast.Call, count: int) -> tuple[ast.expr, tuple[str, ...] | int] | None:
    """Return the tensor that a call splits into columns, and the pieces' widths."""
    name = _called(call)
    if ast.unparse(call.func) == NORMED_SPLIT and len(call.args) == 5 and count == 3:
        q, kv = (ast.unparse(arg) for arg in call.args[3:])
        return call.args[2], (q, kv, kv)
    if name not in ("split", "chunk") or not isinstance(call.func, ast.Attribute):
        return None
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    first = call.args[0] if call.args else keywords.get("chunks")
    dim = call.args[1] if len(call.args) > 1 else keywords.get("dim")
    if first is None or dim is None or ast.unparse(dim) != "-1":
        return None
    if name == "chunk":
        return (call.func.value, count) if ast.unparse(first) == str(count) else None
    if not isinstance(first, ast.List) or len(first.elts) != count:
        return None
    return call.func.value, tuple(ast.unparse(size) for size in first.elts)


def _vector_name(node: ast.expr) -> str:
    """Return the name of a local vector that is passed, also as `q.float()` or reshaped."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr not in VIEWS | _BY_NUMBER:
            return ""
        node = node.func.value
    return node.id if isinstance(node, ast.Name) else ""


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else "?"
