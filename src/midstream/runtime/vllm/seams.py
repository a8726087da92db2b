"""The functions of vLLM that midstream depends on, and the check that this vLLM has them. Each is a
line of `seams.txt`: a function and its leading parameters, or a class and its attributes, as a
moved field would be read as absent. Differences are reported by name before anything is patched.
"""

from __future__ import annotations

import dis
import functools
import importlib
import inspect
from importlib.resources import files
from types import CodeType
from typing import Any, Literal

from midstream.errors import SeamError
from midstream.runtime.vllm import seam_lines
from midstream.runtime.vllm.seam_lines import Fields, Seam, SeamGroup

# Releases on which engine tests passed, on a CPU or a GPU; docs/versions.md has the runs.
RUN = ("0.26", "0.28", "0.30", "0.32", "0.33")

GROUPS: dict[str, SeamGroup] = seam_lines.parse(
    files("midstream.runtime.vllm").joinpath("seams.txt").read_text(encoding="utf-8")
)
# All seams, for checks of a release's sources.
SEAMS = tuple(seam for group in GROUPS.values() for seam in group.functions)
FIELDS = tuple(fields for group in GROUPS.values() for fields in group.fields)


def check(group: Literal["process", "offline", "async", "server"]) -> None:
    """Check the seams of every process, of offline engines, of async engines or of servers."""
    _check(GROUPS[group])


def is_v2_runner(runner: Any) -> bool:
    """Return whether a model runner is vLLM's V2 runner."""
    return hasattr(runner, "model_state") and not hasattr(runner, "_model_forward")


def check_runner(runner: Any, is_v2: bool) -> None:
    _check(GROUPS["model"])
    group = GROUPS["v2" if is_v2 else "v1"]
    kind = f"{type(runner).__module__}.{type(runner).__qualname__}"
    problems: list[str] = []
    for seam in group.functions:
        if seam.at:
            problems += _problems(_reach(runner, seam.at), seam, f"{kind}.{seam.at}")
        else:
            problems += _function_problems(seam)
    for fields in group.fields:
        if fields.at is None:
            problems += _lacking(fields)
            continue
        paths = (f"{fields.at}.{name}".lstrip(".") for name in fields.names)
        problems += [f"{kind} has no {path}" for path in paths if _reach(runner, path) is None]
    _raise(problems)


def _check(group: SeamGroup) -> None:
    problems = []
    for seam in group.functions:
        problems += _function_problems(seam)
    for fields in group.fields:
        problems += _lacking(fields)
    # One module that cannot be imported is one difference.
    _raise(list(dict.fromkeys(problems)))


def _function_problems(seam: Seam) -> list[str]:
    try:
        module = importlib.import_module(seam.module)
    except ImportError as error:
        return [f"{seam.module}: {error}"]
    return _problems(_reach(module, seam.name), seam, f"{seam.module}.{seam.name}")


def _problems(function: Any, seam: Seam, name: str) -> list[str]:
    if not callable(function):
        return [f"{name} is missing ({seam.why})"]
    parameters = inspect.signature(function).parameters.values()
    taken = [p.name for p in parameters if p.name not in ("self", "cls")]
    wanted = list(seam.parameters)
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in wanted]
    if by_name and taken[: len(wanted)] == wanted:
        taken.insert(taken.index(by_name[0]), "*")
    if taken[: len(wanted)] != wanted:
        return [f"{name} takes ({', '.join(taken)}), expected ({', '.join(wanted)}, …)"]
    lacking = [argument for argument in seam.named if argument not in taken]
    if lacking:
        return [f"{name} takes no {', '.join(lacking)}"]
    packed = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in packed]
    passed = ("self", "cls", *wanted, *seam.named)
    extra = [argument for argument in required if argument not in passed]
    if seam.called and extra:
        needed = ", ".join(extra)
        return [f"{name} requires {needed}, which midstream does not pass ({seam.why})"]
    return []


def _lacking(fields: Fields) -> list[str]:
    if not fields.is_in(importlib.import_module("vllm").__version__):
        return []
    try:
        owner: Any = importlib.import_module(fields.module)
    except ImportError as error:
        return [f"{fields.module}: {error}"]
    name = f"{fields.module}.{fields.owner}".rstrip(".")
    if fields.owner:
        owner = getattr(owner, fields.owner, None)
        if not isinstance(owner, type):
            return [f"{name} is missing ({fields.why})"]
    return [
        f"{name} has no {attribute} ({fields.why})"
        for attribute in fields.names
        if not _has(owner, attribute)
    ]


def _has(owner: Any, name: str) -> bool:
    """Return whether a module or class has an attribute, or a method sets it on objects."""
    if hasattr(owner, name):
        return True
    for base in getattr(owner, "__mro__", ()):
        if name in vars(base).get("__annotations__", ()):
            return True
        for item in vars(base).values():
            code = getattr(inspect.unwrap(item), "__code__", None) if callable(item) else None
            if code is not None and name in code.co_names and name in _stored(code):
                return True
    return False


@functools.cache
def _stored(code: CodeType) -> frozenset[str]:
    """Return the attributes that a method sets on the object that it is a method of."""
    own, names, loaded = code.co_varnames[:1], set[str](), None
    for step in dis.get_instructions(code):
        if step.opname == "STORE_ATTR" and loaded in own:
            names.add(step.argval)
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            # Python 3.13 loads two variables at once.
            loaded = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        elif step.opname != "EXTENDED_ARG":
            loaded = None
    return frozenset(names)


def _reach(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def _raise(problems: list[str]) -> None:
    if problems:
        import vllm

        raise SeamError(
            f"vLLM {vllm.__version__} differs from what this midstream expects "
            f"(engine tests: {', '.join(RUN)}):\n  " + "\n  ".join(problems)
        )
