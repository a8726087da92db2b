"""Fields of other tools that have an equal here, translated into a plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from types import ModuleType

from midstream.compat import easysteer, vllm_fork, vllm_lens
from midstream.compat.foreign_fields import EASYSTEER, FORK, VLLM_LENS
from midstream.errors import SpecError
from midstream.plan.consumers import names_consumers
from midstream.plan.plan import Plan

_TOOLS: Mapping[str, ModuleType] = {FORK: vllm_fork, EASYSTEER: easysteer, VLLM_LENS: vllm_lens}
_TRANSLATED = frozenset(name for module in _TOOLS.values() for name in module.FIELDS)


def translate(fields: Mapping[str, object], known: Container[str] = ()) -> Plan | None:
    """Return the plan of other tools' fields, which are its `coming_from`; None: there are none."""
    if _TRANSLATED.isdisjoint(fields):
        return None
    plans = []
    for tool, module in _TOOLS.items():
        tool_fields = {
            name: fields[name]
            for name in module.FIELDS
            if name not in known and is_translated(name, fields.get(name))
        }
        if tool_fields:
            plan: Plan = module.read_plan(tool_fields)
            plans.append(replace(plan, coming_from=tuple((name, tool) for name in tool_fields)))
    if len(plans) <= 1:
        return plans[0] if plans else None
    return Plan(
        tuple(capture for plan in plans for capture in plan.captures),
        tuple(edit for plan in plans for edit in plan.edits),
        coming_from=tuple(field for plan in plans for field in plan.coming_from),
    )


def is_translated(name: str, value: object) -> bool:
    """Return whether a field is another tool's, and `translate` reads it."""
    if name == "capture":
        return names_consumers(value)  # else it is a misplaced field of midstream
    return value is not None and name in _TRANSLATED


def without_translated(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that `translate` does not read."""
    if _TRANSLATED.isdisjoint(fields):
        return dict(fields)
    return {name: value for name, value in fields.items() if not is_translated(name, value)}


def rename_path(error: SpecError, path_of: Callable[[str], str]) -> SpecError:
    """Return an error of `translate` whose path starts with another form of the field's name."""
    match = re.match(r"(\w+)(.*)", error.path, re.DOTALL)
    if match is None:
        return error
    return SpecError(path_of(match[1]) + match[2], error.problem)
