"""Parser of edits in the forms of tiers, and their check against a model."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import NamedTuple, TypeGuard

from midstream.errors import SpecError
from midstream.plan.argument_names import parameters_of
from midstream.plan.control.act import Switch
from midstream.plan.forms import PhaseLike
from midstream.plan.operations import (
    Edit,
    Gate,
    Local,
    Steer,
    bind_edit,
    in_full,
    is_placed_vector,
    parse_edit,
)
from midstream.plan.plan import Plan, ServerWide, parse_server_wide
from midstream.plan.positions.prompt import Prompt
from midstream.plan.probe import Probe
from midstream.plan.resolve.resolve import resolve
from midstream.plan.selection import Sites
from midstream.plan.shape import ModelShape
from midstream.plan.tap_lookup import find_taps
from midstream.plan.vectors.named_lookup import Lookup
from midstream.plan.vectors.named_vector import Named
from midstream.steering.parse import read_placed
from midstream.validation import MAX_PARTS, at, kind, read_fields

# Tiers, and the phase of the tokens that each applies to.
TIERS: Mapping[str, PhaseLike | None] = MappingProxyType(
    {"base": None, "prompt": "prompt", "generated": "generated"}
)

# Keys of a name's whole edits, and the tier or the list that each stands for.
_NAMED_KEYS = {**{tier: tier for tier in TIERS}, "prefill": "prompt", "decode": "generated"}
_EDITS = "edits"
# Fields that only a probe has in a tier, whose edits have an `op`, or are a Steer or a name.
_PROBES = frozenset(sum(parameters_of(Probe), ())) - {*sum(parameters_of(Steer), ()), "name"}

_FORMS = (
    "an edit, a Direction or a Probe, a registered name, (name, scale), (vector, layer), "
    "{hook point: {layer: vector}}, or a list of these"
)
_REFERENCE = 'a registered name, (name, scale) or {"name": …, "scale": …}'


class Part(NamedTuple):
    """One edit of a tier; its path in the input, such as `[2]`, is empty if it is all of it."""

    path: str
    edit: Edit


class ProbePart(NamedTuple):
    """One probe of a tier, with its path as of `Part`."""

    path: str
    probe: Probe


def read_tier(value: object, phase: PhaseLike | None) -> tuple[Part | ProbePart, ...]:
    """Parse the edits and probes of a tier in any of `_FORMS`; a Probe may be its dict."""
    if not isinstance(value, (list, tuple)) or _is_pair(value) or is_placed_vector(value):
        return _read_one(value, phase)
    tier_parts: list[Part | ProbePart] = []
    for index, form in enumerate(value):
        with at(f"[{index}]"):
            parts = _read_one(form, phase)
        tier_parts.extend(part._replace(path=f"[{index}]{part.path}") for part in parts)
    if len(tier_parts) > MAX_PARTS:
        raise SpecError("", f"expected at most {MAX_PARTS} edits per tier, got {len(tier_parts)}")
    return tuple(tier_parts)


def names_edits(value: object) -> TypeGuard[Mapping[object, object]]:
    """Return whether `value` is a dict of whole edits, as `read_named_edits` reads it."""
    return isinstance(value, Mapping) and any(
        key == _EDITS or key in _NAMED_KEYS for key in value if isinstance(key, str)
    )


def read_named_edits(value: Mapping[object, object]) -> tuple[Part, ...]:
    """Parse a name's whole edits, `{"base": …, "prompt": …, "generated": …, "edits": …}`, in order;
    the first three, also `prefill` and `decode`, are tiers, and `edits` have phases of their own.
    """
    fields = read_fields(value, required=(), optional=(*_NAMED_KEYS, _EDITS))
    tiers: dict[str, str] = {}
    for key in fields:
        if key != _EDITS and tiers.setdefault(_NAMED_KEYS[key], key) != key:
            raise SpecError(key, f"the same tier as `{tiers[_NAMED_KEYS[key]]}`; give one of them")
    named_parts: list[Part] = []
    for tier, phase in TIERS.items():
        if tier in tiers:
            key = tiers[tier]
            with at(key):
                parts = read_tier(fields[key], phase)
            for part in parts:
                if isinstance(part, ProbePart):
                    raise SpecError(key + part.path, "a name has edits; a probe is no edit")
                named_parts.append(part._replace(path=key + part.path))
    if _EDITS in fields:
        one_or_more = fields[_EDITS]
        several = one_or_more if isinstance(one_or_more, (list, tuple)) else [one_or_more]
        for index, edit in enumerate(several):
            path = f"{_EDITS}[{index}]"
            with at(path):
                named_parts.append(Part(path, _not_local(parse_edit(edit))))
    if not named_parts:
        raise SpecError("", "there is no edit")
    if len(named_parts) > MAX_PARTS:
        raise SpecError("", f"expected at most {MAX_PARTS} edits, got {len(named_parts)}")
    return tuple(named_parts)


def read_hooks(value: object, phase: PhaseLike | None) -> tuple[Part, ...]:
    """Return a Steer for each vector of a dict that `read_placed` reads."""
    return tuple(
        Part(
            placed.path,
            Steer(placed.vector, placed.layer, placed.scale, Sites(placed.site), phase=phase),
        )
        for placed in read_placed(value)
    )


def read_reference(value: object) -> Named:
    """Parse a registered name: a Named, `name`, `(name, scale)` or `{"name": …, "scale": …}`."""
    if _is_pair(value):
        return Named(*value)  # type: ignore[misc]
    if not isinstance(value, (str, Named, Mapping)):
        raise SpecError("", f"expected {_REFERENCE}, got {kind(value)}")
    return Named.parse(value)


def narrowed(edit: Edit, phase: str | None) -> Edit:
    """Return the edit restricted to the tokens of one phase; None for every token."""
    _check_phase(edit.positions.phase, phase)
    return edit if phase is None else changed(edit, phase=phase)


def _narrowed_probe(probe: Probe, phase: str | None) -> Probe:
    if isinstance(probe.act, Switch):
        raise SpecError(
            "act", "a Switch changes the edits of one request; give the probe with that request"
        )
    _check_phase(probe.positions.phase, phase)
    return probe if phase is None else probe.replace(phase=phase)


def _check_phase(own: str, phase: str | None) -> None:
    if own not in ("all", phase):
        tokens = "every token" if phase is None else f'"{phase}" tokens'
        raise SpecError(
            "phase", f'"{own}" contradicts the tier, which is for {tokens}; use `{own}`'
        )


def changed(edit: Edit, **place: object) -> Edit:
    """Return the edit with other `positions` or `phase`; for a Gate, those of its inner edit."""
    if isinstance(edit, Gate):
        return dataclasses.replace(edit, edit=edit.edit.replace(**place))
    return edit.replace(**place)


def bind_part(part: Part, lookup: Lookup, shape: ModelShape) -> Iterator[Edit]:
    """Yield the edit with names replaced by what is registered, checked against the model."""
    with at(part.path) if part.path else nullcontext():
        for edit in bind_edit(part.edit, lookup, shape.num_layers):
            _check(edit, shape)
            yield edit


def bind_tier(
    parts: Sequence[Part | ProbePart], lookup: Lookup, shape: ModelShape
) -> Iterator[ServerWide]:
    """Yield the edits and probes of a tier likewise; see `bind_part`."""
    for part in parts:
        if isinstance(part, Part):
            yield from bind_part(part, lookup, shape)
            continue
        with at(part.path) if part.path else nullcontext():
            for probe in part.probe.bind(lookup, shape.num_layers):
                if probe.info is not None:
                    probe.info.check("", shape)
                everywhere = Plan(probes=(probe.replace(positions="all", phase=None),))
                _resolve("probes[0]", everywhere, Prompt(1), shape)
                yield probe


def _check(edit: Edit, shape: ModelShape) -> None:
    """Raise SpecError if the edit cannot be applied to any request of this model."""
    taps = find_taps(edit.layers, edit.sites, shape, "layer", "site")
    inner = edit.edit if isinstance(edit, Gate) else edit
    with nullcontext() if inner is edit else at("edit"):
        steps = inner.steps(shape.size(taps[0]))
    # Positions depend on the request, and are checked at admission.
    rows = max(len(step.write) for step in steps)
    placed = changed(edit, positions="all" if rows <= 1 else slice(0, rows))
    _resolve("edits[0]", Plan(edits=(placed,)), Prompt(max(rows, 1)), shape)


def _resolve(part: str, plan: Plan, prompt: Prompt, shape: ModelShape) -> None:
    """Raise SpecError if a plan's only part cannot be resolved; the path is relative to it."""
    try:
        resolve(plan, shape, prompt, None)
    except SpecError as error:
        path = error.path.removeprefix(part).removeprefix(".")
        raise SpecError(path, error.problem) from None


def _is_pair(value: object) -> bool:
    """Whether `value` is `(name, scale)`, which is a list in JSON."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], numbers.Real)
    )


def _not_local(edit: Edit) -> Edit:
    if isinstance(edit, Local):
        raise SpecError("", "a function is given with each request, as edits=Local(fn, layer=14)")
    return edit


def _read_one(value: object, phase: PhaseLike | None) -> tuple[Part | ProbePart, ...]:
    value = value if _is_pair(value) else in_full(value)
    if isinstance(value, Edit):
        return (Part("", narrowed(_not_local(value), phase)),)
    if isinstance(value, Probe):
        return (ProbePart("", _narrowed_probe(value, phase)),)
    if isinstance(value, (str, Named)) or _is_pair(value):
        return (Part("", Steer(read_reference(value), phase=phase)),)
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected {_FORMS}, got {kind(value)}")
    if value.get("op") == "probe":
        probe = parse_server_wide(value)
        assert isinstance(probe, Probe)
        return (ProbePart("", _narrowed_probe(probe, phase)),)
    if "op" in value:
        return (Part("", narrowed(parse_edit(value), phase)),)
    if not _PROBES.isdisjoint(value):
        return (ProbePart("", _narrowed_probe(Probe.parse(value), phase)),)
    if "vector" in value or "rows" in value:
        return (Part("", narrowed(Steer.parse(value), phase)),)
    if "name" in value:
        return (Part("", Steer(read_reference(value), phase=phase)),)
    return read_hooks(value, phase)
