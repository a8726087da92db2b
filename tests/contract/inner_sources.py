"""What the rules of `inner_sites` see in the sources of vLLM's models, without building them.

The reader is the package's; what a module's attributes are is read from constructors here, and a
condition that depends on a configuration counts both ways.
"""

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.sources import (
    class_node,
    each_vllm_entry,
    file_of,
    forward_of,
    is_in_this_release,
    leaves_of,
    unparse,
    vllm_root,
)
from support.syntax import walk

from midstream.errors import UnsupportedError
from midstream.runtime.models.forward_flow import (
    Flow,
    FlowCall,
    Names,
    OutputPart,
    Trace,
    Value,
    path_of,
    read,
)
from midstream.runtime.models.forward_source import _calls, _methods
from midstream.runtime.models.inner_sites import (
    ELEMENTWISE,
    FUSED_QUANT,
    HEADWISE,
    MLA,
    NO_ATTENTION,
    ROTARY,
    UNPROVEN,
)
from midstream.runtime.models.registry import CONVENTIONS

MATRIX = re.compile(r"(Linear|LinearNode)$")
# The names under which models make vLLM's attention.
ATTENTION = frozenset(
    (
        "Attention",
        "EncoderOnlyAttention",
        "ChunkedLocalAttention",
        "attn_cls",
        "attn_layer_cls",
        "attention_cls",
        "self._build_attention",
    )
)
LATENT = re.compile(r"(MLAAttention|MultiHeadLatentAttentionWrapper|MLAModules)")


@dataclass(frozen=True)
class Owner:
    """A class whose constructor makes attention or matrices.

    Attributes:
        path: its file.
        node: the class.
        makes: by attribute, the names of the classes or functions that make it.
    """

    path: Path
    node: ast.ClassDef
    makes: dict[str, frozenset[str]]

    def kind(self, path: str) -> str | None:
        made = self.makes.get(path)
        if made is None:
            return None
        if any(MATRIX.search(name) or name in ATTENTION for name in made):
            return "matrix"
        return "module"

    def attributes(self, names: frozenset[str]) -> list[str]:
        return [
            attribute
            for attribute, made in self.makes.items()
            if made & names and attribute not in ("self_attn", "attention")
        ]


def _bases(path: Path, node: ast.ClassDef) -> Iterator[tuple[Path, ast.ClassDef]]:
    yield path, node
    for base in node.bases:
        found = resolve(path, unparse(base))
        if found:
            yield from _bases(*found)


IMPORT = re.compile(r"^[ \t]*(from [.\w]+ import (?:\([^)]*\)|[^\n(]+))", re.MULTILINE)


@functools.cache
def _imports(path: Path) -> dict[str, tuple[Path, str]]:
    """The file of vLLM in which each imported name may be defined, and its name there."""
    found = {}
    # To parse the imports alone is many times as fast as to parse the files.
    for text in IMPORT.findall(path.read_text()):
        (item,) = ast.parse(text).body
        if isinstance(item, ast.ImportFrom):
            above = path
            for _ in range(item.level):
                above = above.parent
            module = (item.module or "").removeprefix("vllm.").replace(".", "/")
            home = (above if item.level else vllm_root()) / f"{module}.py"
            if home.exists():
                found.update(
                    {alias.asname or alias.name: (home, alias.name) for alias in item.names}
                )
    return found


def resolve(path: Path, name: str) -> tuple[Path, ast.ClassDef] | None:
    """The class of a name in a file of vLLM's models, wherever it is defined."""
    node = class_node(path, name)
    if node is not None:
        return path, node
    home, name = _imports(path).get(name, (None, ""))
    if home is None or "layers" in home.parts:
        return None
    node = class_node(home, name)
    return (home, node) if node else None


def owner_of(path: Path, node: ast.ClassDef) -> Owner:
    makes: dict[str, frozenset[str]] = {}
    for _, cls in reversed(list(_bases(path, node))):
        for function in cls.body:
            if isinstance(function, ast.FunctionDef) and _is_constructor(function):
                for item in walk(function):
                    for attribute, value in _stored(item):
                        names = frozenset(
                            unparse(call.func) for call in walk(value) if isinstance(call, ast.Call)
                        )
                        makes[attribute] = makes.get(attribute, frozenset()) | names
    modules = {name: made for name, made in makes.items() if any(map(_is_module, made))}
    return Owner(path, node, modules)


def _is_constructor(function: ast.FunctionDef) -> bool:
    return function.name == "__init__" or function.name.startswith(("_init", "_build"))


def _is_module(name: str) -> bool:
    last = name.rpartition(".")[2]
    made_by = "get_rope", "get_act", "attn_", "attention_cls", "_build_attention"
    return last[:1].isupper() or last.startswith(made_by)


def _stored(item: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(item, ast.Assign | ast.AnnAssign) and item.value is not None:
        targets = item.targets if isinstance(item, ast.Assign) else [item.target]
        for target in targets:
            attribute = path_of(target)
            if attribute and "." not in attribute:
                yield attribute, item.value


def within(path: Path, node: ast.ClassDef, depth: int = 3) -> dict[str, Owner]:
    """The classes that a layer's class makes, directly or not, and the layer's own, by name."""
    found = {node.name: owner_of(path, node)}
    if depth:
        for name in sorted(_named(path, node)):
            inner = resolve(path, name)
            if inner and name not in found and not name.endswith("Config"):
                for key, owner in within(*inner, depth - 1).items():
                    found.setdefault(key, owner)
    return found


def _named(path: Path, node: ast.ClassDef) -> set[str]:
    names = set()
    for _, cls in _bases(path, node):
        for function in cls.body:
            by_class = isinstance(function, ast.AnnAssign | ast.Assign)
            if by_class or (isinstance(function, ast.FunctionDef) and _is_constructor(function)):
                names |= {one.id for one in walk(function) if isinstance(one, ast.Name)}
                names |= {
                    one.attr
                    for one in walk(function)
                    if isinstance(one, ast.Attribute) and one.attr[:1].isupper()
                }
    return {name for name in names if name[:1].isupper()}


def method_calling(owner: Owner, name: str) -> tuple[ast.FunctionDef, Path]:
    """The forward, or the one method it calls, that calls a sub-module."""
    bases = list(_bases(owner.path, owner.node))
    forward, home = next(((f, p) for p, n in bases if (f := forward_of(n))), (None, None))
    if forward is None or home is None:
        raise UnsupportedError("it has no forward")
    if _calls(forward, name):
        return forward, home
    methods = {
        item.name: item
        for _, cls in reversed(bases)
        for item in cls.body
        if isinstance(item, ast.FunctionDef)
    }
    inner = [methods[one] for one in sorted(_methods(forward)) if one in methods]
    inner = [one for one in inner if _calls(one, name)]
    if len(inner) != 1:
        raise UnsupportedError(f"its forward does not call its {name!r}")
    return inner[0], home


def _decide(test: ast.expr) -> bool | None:
    return False if unparse(test) == "current_platform.is_rocm()" else None


def flow_of(owner: Owner, name: str) -> Flow:
    return read(method_calling(owner, name)[0], Names(owner.kind, _decide))


def attention(owners: dict[str, Owner]) -> dict[str, str]:
    """Per attention class and site, `found` or why not, as far as sources can tell."""
    found: dict[str, str] = {}
    for name, owner in owners.items():
        for attribute in owner.attributes(ATTENTION):
            found[name] = _attention(owner, attribute)
    if not found and any(LATENT.search(made) for o in owners.values() for m in o.makes.values()
                         for made in m):  # fmt: skip
        return {"": MLA}
    return found or {"": NO_ATTENTION}


def _attention(owner: Owner, attribute: str) -> str:
    """The sites that a form of attention shows, in words."""
    try:
        flow = flow_of(owner, attribute)
    except UnsupportedError as error:
        return f"unreadable: {error}"
    calls = flow.of(attribute)
    if not calls or attribute in flow.bypassed:
        return UNPROVEN
    parts = [
        name
        for number, name in enumerate(("q", "k", "v"))
        if all(_is_piece(owner, flow, call, number) for call in calls)
    ]
    rotary = [
        name
        for number, name in enumerate(("rot_q", "rot_k"))
        if name[-1] in parts and all(_is_rotated(call, number) for call in calls)
    ]
    mixed = _mixed(owner, flow, attribute)
    one = "" if len(calls) == 1 else f" by {len(calls)} calls"
    return " ".join([*parts, *rotary, *mixed]) + one


def _argument(call: FlowCall, number: int) -> Value | None:
    return call.argument(number, ("query", "key", "value")[number])


def _is_piece(owner: Owner, flow: Flow, call: FlowCall, number: int) -> bool:
    value = _argument(call, number)
    if value is None or len(value.parts) != 1:
        return False
    part = next(iter(value.parts))
    unknown = {one for one in value.through if one.endswith("()")} - HEADWISE
    if unknown or part.path in flow.bypassed or owner.kind(part.path) != "matrix":
        return False
    return part.index is None or part.index == number


def _is_rotated(call: FlowCall, number: int) -> bool:
    value = _argument(call, number)
    return value is not None and any("rotary" in one or one in ROTARY for one in value.through)


def _mixed(owner: Owner, flow: Flow, attribute: str) -> list[str]:
    given = [
        (call.path, value)
        for call in flow.calls
        if owner.kind(call.path) == "matrix"
        for value in (call.argument(0, "input_"),)
        if value is not None and any(part.path == attribute for part in value.parts)
    ]
    if len(given) != 1:
        return []
    path, value = given[0]
    if value == Value(frozenset({Trace(OutputPart(attribute))})):
        return ["z"]
    through = value.of(attribute).through
    unknown = {one for one in through if one.endswith("()")} - HEADWISE - ELEMENTWISE
    return [] if unknown or path in flow.bypassed else ["z(gated)"]


def mlps(owners: dict[str, Owner]) -> dict[str, str]:
    """Per class with a row-parallel matrix that is no attention's, what the rules find in it."""
    rows = {
        name: owner.attributes(frozenset(("RowParallelLinear",))) for name, owner in owners.items()
    }
    found = {}
    for name, attributes in rows.items():
        owner = owners[name]
        if not attributes or owner.attributes(ATTENTION) or "Attention" in name or "Mixer" in name:
            continue
        found[name] = _mlp(owner, attributes)
    return found


def _mlp(owner: Owner, attributes: list[str]) -> str:
    if len(attributes) != 1:
        return f"{len(attributes)} last matrices"
    try:
        flow = flow_of(owner, attributes[0])
    except UnsupportedError as error:
        return f"unreadable: {error}"
    calls = flow.of(attributes[0])
    value = calls[0].argument(0, "input_") if len(calls) == 1 else None
    if value is None or not value.parts:
        return UNPROVEN
    act = [] if attributes[0] in flow.bypassed and FUSED_QUANT not in value.through else ["mlp_act"]
    through = value.through - {FUSED_QUANT}
    parts = list(value.parts)
    if len(parts) == 1 and parts[0].index is None and len(through) == 1:
        act = ["mlp_pre", *act]
    return " ".join(act)


def routers(owners: dict[str, Owner]) -> dict[str, str]:
    """Per class that makes fused experts, whether its router is called by itself."""
    found = {}
    fused = frozenset(("FusedMoE", "FusedMoEFactory", "SharedFusedMoE"))
    for name, owner in owners.items():
        for attribute in owner.attributes(fused):
            found[name] = _router(owner, attribute)
    return found


def _router(owner: Owner, attribute: str) -> str:
    try:
        flow = flow_of(owner, attribute)
    except UnsupportedError as error:
        return f"unreadable: {error}"
    text = "\n".join(unparse(cls) for _, cls in _bases(owner.path, owner.node))
    inner = " (gate given to the experts)" if re.search(r"\bgate=self\.", text) else ""
    values = [call.argument(1, "router_logits") for call in flow.of(attribute)]
    parts = {part.path for value in values if value for part in value.parts}
    through = {one for value in values if value for one in value.through}
    return (f"router at {sorted(parts)} {sorted(through) or ''}" if parts else "internal") + inner


def each_layer() -> Iterator[tuple[str, dict[str, Owner]]]:
    """Every decoder layer of vLLM in this release that can be tapped, with the classes below it."""
    for key, name in each_vllm_entry():
        if is_in_this_release(name) and any(leaves_of(CONVENTIONS[key])):
            node = class_node(file_of(key), key[1])
            assert node
            yield name, within(file_of(key), node)
