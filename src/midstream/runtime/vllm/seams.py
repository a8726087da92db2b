"""The functions of vLLM that midstream depends on, and the check that this vLLM has them.

Every seam is data: a function and its leading parameters, or a class and its attributes
(`seam_fields`). Additions in a release do no harm, but for a required parameter of what midstream
calls itself; such additions, removals and renames are reported by name before anything is patched.
`scripts/seams.py` checks the same data against the sources of any release.
"""

from __future__ import annotations

import dis
import importlib
import inspect
from typing import Any

from midstream.errors import SeamError
from midstream.runtime.vllm.seam_fields import (
    ASYNC_FIELDS,
    OFFLINE_FIELDS,
    PROCESS_FIELDS,
    SERVER_FIELDS,
)
from midstream.runtime.vllm.seam_functions import ASYNC_SEAMS, OFFLINE_SEAMS, PROCESS_SEAMS
from midstream.runtime.vllm.seam_runners import (
    MODEL_FIELDS,
    MODEL_SEAMS,
    V1_FIELDS,
    V1_SEAMS,
    V2_FIELDS,
    V2_SEAMS,
)
from midstream.runtime.vllm.seam_types import Fields, Seam

# Releases on which engine tests passed, on a CPU or a GPU; docs/versions.md has the runs.
RUN = ("0.26", "0.28", "0.30", "0.32", "0.33")

# All seams, for checks of a release's sources.
SEAMS = (*PROCESS_SEAMS, *OFFLINE_SEAMS, *ASYNC_SEAMS, *MODEL_SEAMS, *V1_SEAMS, *V2_SEAMS)
FIELDS = (
    *PROCESS_FIELDS,
    *OFFLINE_FIELDS,
    *ASYNC_FIELDS,
    *SERVER_FIELDS,
    *MODEL_FIELDS,
    *V1_FIELDS,
    *V2_FIELDS,
)


def check_process() -> None:
    """Check the seams that every process uses.

    Raises:
        SeamError: names each difference.
    """
    _check(PROCESS_SEAMS, PROCESS_FIELDS)


def check_offline() -> None:
    """Check the seams of offline engines.

    Raises:
        SeamError: names each difference.
    """
    _check(OFFLINE_SEAMS, OFFLINE_FIELDS)


def check_async() -> None:
    """Check the seams of async engines.

    Raises:
        SeamError: names each difference.
    """
    _check(ASYNC_SEAMS, ASYNC_FIELDS)


def check_server() -> None:
    """Check the seams of servers.

    Raises:
        SeamError: names each difference.
    """
    _check((), SERVER_FIELDS)


def is_v2_runner(runner: Any) -> bool:
    """Return whether a model runner is vLLM's V2 runner."""
    return hasattr(runner, "model_state") and not hasattr(runner, "_model_forward")


def check_runner(runner: Any, is_v2: bool) -> None:
    """Check the seams of a model runner whose model is loaded.

    Raises:
        SeamError: names each difference.
    """
    _check(MODEL_SEAMS, MODEL_FIELDS)
    kind = f"{type(runner).__module__}.{type(runner).__qualname__}"
    problems: list[str] = []
    for seam in V2_SEAMS if is_v2 else V1_SEAMS:
        if seam.at:
            problems += _problems(_reach(runner, seam.at), seam, f"{kind}.{seam.at}")
        else:
            problems += _function_problems(seam)
    for fields in V2_FIELDS if is_v2 else V1_FIELDS:
        if fields.at is None:
            problems += _lacking(fields)
            continue
        paths = (f"{fields.at}.{name}".lstrip(".") for name in fields.names)
        problems += [f"{kind} has no {path}" for path in paths if _reach(runner, path) is None]
    _raise(problems)


def _check(seams: tuple[Seam, ...], fields: tuple[Fields, ...]) -> None:
    problems = []
    for seam in seams:
        problems += _function_problems(seam)
    for one in fields:
        problems += _lacking(one)
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
    given = inspect.signature(function).parameters.values()
    found = [one.name for one in given if one.name not in ("self", "cls")]
    wanted = list(seam.parameters)
    by_name = [one.name for one in given if one.kind is one.KEYWORD_ONLY and one.name in wanted]
    if by_name and found[: len(wanted)] == wanted:
        found.insert(found.index(by_name[0]), "*")
    if found[: len(wanted)] != wanted:
        return [f"{name} takes ({', '.join(found)}), expected ({', '.join(wanted)}, …)"]
    lacking = [one for one in seam.named if one not in found]
    if lacking:
        return [f"{name} takes no {', '.join(lacking)}"]
    packed = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    required = [one.name for one in given if one.default is one.empty and one.kind not in packed]
    extra = [one for one in required if one in found and one not in (*wanted, *seam.named)]
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
    return [f"{name} has no {one} ({fields.why})" for one in fields.names if not _has(owner, one)]


def _has(owner: Any, name: str) -> bool:
    """Return whether a module or class has an attribute, or a method sets it on objects."""
    if hasattr(owner, name):
        return True
    for base in getattr(owner, "__mro__", ()):
        if name in vars(base).get("__annotations__", ()):
            return True
        for item in vars(base).values():
            code = getattr(inspect.unwrap(item), "__code__", None) if callable(item) else None
            if code is not None and name in code.co_names and _stores(code, name):
                return True
    return False


def _stores(code: Any, name: str) -> bool:
    """Return whether a method sets an attribute of the object that it is a method of."""
    own = code.co_varnames[:1]
    loaded: Any = None
    for step in dis.get_instructions(code):
        if step.opname == "STORE_ATTR" and step.argval == name and loaded in own:
            return True
        if step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            # Python 3.13 loads two variables at once.
            loaded = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        elif step.opname != "EXTENDED_ARG":
            loaded = None
    return False


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
