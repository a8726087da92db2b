"""Captures given as a dict by sink: `{"filesystem": {"request_id": …, "hooks": …}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TypeGuard

from midstream.errors import SpecError
from midstream.plan.readouts.capture import FIELDS, Capture
from midstream.plan.selection import Sites, read_site
from midstream.plan.sink_target import read_name
from midstream.validation import at, kind, read_fields

# Position words of the consumer form, and the equivalent words of Positions.
_POSITIONS = {"all_prompt": "prompt", "all_generated": "generated"}
_OPTIONAL = ("positions", "request_id", "tag", "metadata", "codec", "layout")


def names_consumers(value: object) -> TypeGuard[Mapping[object, object]]:
    """Return whether `value` is `{sink: {…}}` rather than the fields of a Capture."""
    return (
        isinstance(value, Mapping)
        and not any(name in value for name in FIELDS)
        and any(isinstance(part, Mapping) or hasattr(part, "hooks") for part in value.values())
    )


def read_consumers(value: Mapping[object, object]) -> tuple[Capture, ...]:
    """Return one Capture per sink and hook point, of a dict or dataclass for each sink."""
    captures: list[Capture] = []
    for sink, request in value.items():
        with at(f"[{json.dumps(sink) if isinstance(sink, str) else kind(sink)}]"):
            captures.extend(_read_one(read_name(sink, may_be_empty=False), request))
    return tuple(captures)


def _read_one(sink: str, value: object) -> list[Capture]:
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    arguments = read_fields(value, required=("hooks",), optional=_OPTIONAL)
    hooks = arguments.pop("hooks")
    positions = arguments.pop("positions", "all")
    if isinstance(positions, str):
        positions = _POSITIONS.get(positions, positions)
    # Dataclasses use None for omitted fields.
    rest = {name: part for name, part in arguments.items() if part is not None}
    if not isinstance(hooks, Mapping) or not hooks:
        raise SpecError("hooks", f"expected {{hook point: [layer, …]}}, got {kind(hooks)}")
    captures = []
    for hook, layers in hooks.items():
        path = f"hooks[{json.dumps(hook) if isinstance(hook, str) else kind(hook)}]"
        with at(path):
            site = Sites(read_site(hook))
        try:
            captures.append(Capture(layers, site, positions, sink=sink, **rest))
        except SpecError as error:
            if not error.path.startswith("layers"):
                raise
            raise SpecError(path + error.path.removeprefix("layers"), error.problem) from None
    return captures
