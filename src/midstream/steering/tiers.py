"""Server-wide edits for every request of an engine, in three additive tiers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import numbers
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from midstream.errors import SpecError
from midstream.spec.named_vector import Named
from midstream.spec.operations import Edit, Gate, Steer, parse_edit
from midstream.spec.plan import Plan
from midstream.spec.positions.positions import Positions
from midstream.spec.positions.prompt import Prompt
from midstream.spec.resolve.resolve import resolve
from midstream.spec.resolve.tap_lookup import find_taps
from midstream.spec.shape import ModelShape
from midstream.steering.listing import html_table, text_table
from midstream.steering.parse import read_placed
from midstream.steering.registry import VectorRegistry
from midstream.validation import MAX_PARTS, at, kind

# Tiers, and the phase of the tokens that each applies to.
TIERS: Mapping[str, str | None] = MappingProxyType(
    {"base": None, "prompt": "prompt", "generated": "generated"}
)

_HEADINGS = ("tier", "op", "taps", "scale", "norm", "positions")
_SHOWN_TAPS = 3


@dataclass(frozen=True, slots=True)
class SteeringState:
    """The active edits of each tier, by value.

    Attributes:
        base: edits of every token.
        prompt: edits of the prompt's tokens.
        generated: edits of generated tokens.
        epoch: how often the tiers were changed.
        digest: SHA-256 of all edits, in hex: equal if and only if the edits are equal.
    """

    base: tuple[Edit, ...] = ()
    prompt: tuple[Edit, ...] = ()
    generated: tuple[Edit, ...] = ()
    epoch: int = 0
    digest: str = hashlib.sha256(b"[]").hexdigest()

    @property
    def edits(self) -> tuple[Edit, ...]:
        """All edits, in the order in which they are applied."""
        return (*self.base, *self.prompt, *self.generated)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, including the vectors."""
        tiers = {tier: [edit.to_dict() for edit in getattr(self, tier)] for tier in TIERS}
        return {**tiers, "epoch": self.epoch, "digest": self.digest}

    def __str__(self) -> str:
        rows = self._rows()
        return text_table(_HEADINGS, rows) if rows else "no server-wide steering"

    def _repr_html_(self) -> str:
        rows = self._rows()
        return html_table(_HEADINGS, rows) if rows else "<p>no server-wide steering</p>"

    def _rows(self) -> list[tuple[str, ...]]:
        return [(tier, *_cells(edit)) for tier in TIERS for edit in getattr(self, tier)]


class Steering:
    """`llm.steering`: edits that are applied to every request before its own. Thread-safe.

    A request keeps the edits that are active at its admission.
    """

    def __init__(self, registry: VectorRegistry) -> None:
        """Create empty tiers.

        Args:
            registry: named vectors, and the model that the edits must fit.
        """
        self._registry = registry
        self._state = SteeringState()
        self._lock = threading.Lock()

    def set(
        self, *, base: object = None, prompt: object = None, generated: object = None
    ) -> SteeringState:
        """Replace the given tiers atomically; other tiers stay unchanged.

        Tiers are additive: a prompt token gets the edits of `base` and `prompt`, a generated token
        those of `base` and `generated`.

        Args:
            base, prompt, generated: an edit or its dict; a registered name; `(name, scale)`;
                `{"post_block": {15: vector}}` or `{15: vector}`, where a vector may be
                `{"vector": …, "scale": …}`; or a list of these. `[]` clears the tier; None leaves
                it unchanged. A name is resolved now: registering it again has no effect on the
                tier until the tier is set again.

        Returns:
            The active edits.

        Raises:
            SpecError: no tier is given, a value is malformed, an edit's phase contradicts the
                tier's, a name is not registered, or the model lacks a layer or tap. The path
                starts with the tier. Nothing is changed.
        """
        given = {"base": base, "prompt": prompt, "generated": generated}
        given = {tier: value for tier, value in given.items() if value is not None}
        if not given:
            raise SpecError("", "no tier is given; expected base=, prompt= or generated=")
        read = {}
        for tier, value in given.items():
            with at(tier):
                parts = read_tier(value, TIERS[tier])
                read[tier] = tuple(edit for part in parts for edit in self._bind(part))
        return self._change(read)

    def clear(self) -> SteeringState:
        """Clear all tiers; return the new state."""
        return self._change(dict.fromkeys(TIERS, ()))

    def show(self) -> SteeringState:
        """Return the active edits; prints as a table."""
        return self._state

    def plan_edits(self, max_tokens: int | None = None) -> tuple[Edit, ...]:
        """Return the edits that a request admitted now gets before its own.

        Args:
            max_tokens: the request's limit of generated tokens. With 1, edits of generated tokens
                are omitted: the last token is never fed back, so there is none to edit.
        """
        edits = self._state.edits
        if max_tokens == 1:
            edits = tuple(edit for edit in edits if not _only_generated(edit))
        return edits

    @property
    def epoch(self) -> int:
        """How often the tiers were changed."""
        return self._state.epoch

    @property
    def digest(self) -> str:
        """SHA-256 of the active edits, in hex."""
        return self._state.digest

    def __bool__(self) -> bool:
        return bool(self._state.edits)

    def __str__(self) -> str:
        return str(self._state)

    def __repr__(self) -> str:
        return f"Steering({len(self._state.edits)} edits)"

    def _repr_html_(self) -> str:
        return self._state._repr_html_()

    def _change(self, tiers: Mapping[str, tuple[Edit, ...]]) -> SteeringState:
        with self._lock:
            before = self._state
            new = {tier: getattr(before, tier) for tier in TIERS} | dict(tiers)
            self._state = SteeringState(**new, epoch=before.epoch + 1, digest=_digest(new))
            return self._state

    def _bind(self, part: Part) -> Iterator[Edit]:
        """Yield the edit with names resolved, checked against the model."""
        shape = self._registry.shape
        with at(part.path) if part.path else nullcontext():
            for edit in part.edit.bind(self._registry.lookup, shape.num_layers):
                _check(edit, shape)
                yield edit


def _check(edit: Edit, shape: ModelShape) -> None:
    """Raise SpecError if the edit cannot be applied to any request of this model."""
    find_taps(edit.layers, edit.sites, shape, "layer", "site")
    steps = edit.instructions(shape.hidden_size)
    # Positions depend on the request. Edits with a row per position are checked at admission.
    if all(len(step.write) <= 1 for step in steps):
        try:
            resolve(Plan(edits=(changed(edit, positions="all"),)), shape, Prompt(1), None)
        except SpecError as error:
            path = error.path.removeprefix("edits[0]").removeprefix(".")
            raise SpecError(path, error.problem) from None


def _only_generated(edit: Edit) -> bool:
    positions = edit.positions
    return positions.phase == "generated" or set(positions.include) == {"generated"}


def _digest(tiers: Mapping[str, tuple[Edit, ...]]) -> str:
    content = [[tier, edit.to_dict()] for tier in TIERS for edit in tiers[tier]]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def _cells(edit: Edit) -> tuple[str, ...]:
    """Return the cells of an edit's table row, after the tier."""
    inner = edit.edit if isinstance(edit, Gate) else edit
    op = f"{edit.op}: {inner.op}" if isinstance(edit, Gate) else edit.op
    vector, scale = getattr(inner, "vector", None), getattr(inner, "scale", None)
    return (
        op,
        _show_taps(edit),
        "" if scale is None else f"{scale:g}",
        "" if vector is None else f"{vector.norm:.4g}",
        _show_positions(edit.positions),
    )


def _show_taps(edit: Edit) -> str:
    indices = edit.layers.indices
    layers = ["all"] if indices == "all" else [str(index) for index in indices]
    taps = [f"{site}.{layer}" for layer in layers for site in edit.sites]
    more = f", … ({len(taps)})" if len(taps) > _SHOWN_TAPS else ""
    return ", ".join(taps[:_SHOWN_TAPS]) + more


def _show_positions(positions: Positions) -> str:
    found = ", ".join(map(str, positions.include))
    if positions.exclude:
        found += f", but {', '.join(map(str, positions.exclude))}"
    return found if positions.phase == "all" else f"{positions.phase}: {found}"


_FORMS = (
    "an edit, a registered name, (name, scale), {hook point: {layer: vector}}, or a list of these"
)
_REFERENCE = 'a registered name, (name, scale) or {"name": …, "scale": …}'


class Part(NamedTuple):
    """One edit of a tier.

    Attributes:
        path: path of the edit in the input, for messages: `[2]`, `["post_block"][15]`; empty if
            the edit is the whole input.
        edit: the edit, with unresolved names.
    """

    path: str
    edit: Edit


def read_tier(value: object, phase: str | None) -> tuple[Part, ...]:
    """Parse the edits of one tier in any of its forms.

    Args:
        value: an edit or its dict; a registered name; `(name, scale)`; a value of `read_hooks`;
            or a list of these, which may be empty.
        phase: "prompt" or "generated", to which the edits are restricted; None for every token.

    Raises:
        SpecError: the value has another form, or an edit's phase contradicts the tier's.
    """
    if not isinstance(value, (list, tuple)) or _is_pair(value):
        return _read_one(value, phase)
    found: list[Part] = []
    for index, one in enumerate(value):
        with at(f"[{index}]"):
            parts = _read_one(one, phase)
        found.extend(Part(f"[{index}]{part.path}", part.edit) for part in parts)
    if len(found) > MAX_PARTS:
        raise SpecError("", f"expected at most {MAX_PARTS} edits per tier, got {len(found)}")
    return tuple(found)


def read_hooks(value: object, phase: str | None) -> tuple[Part, ...]:
    """Return one Steer for each vector of `{hook point: {layer: vector}}` or `{layer: vector}`.

    Args:
        value: a dict in any form of `read_placed`. Hook points are `pre_attn`, `post_attn`,
            `post_block`, or any site's name; a vector may be `{"vector": …, "scale": …}`.
        phase: as `read_tier`.

    Raises:
        SpecError: as `read_placed`.
    """
    return tuple(
        Part(one.path, Steer(one.vector, one.layer, one.scale, one.site, phase=phase))
        for one in read_placed(value)
    )


def read_reference(value: object) -> Named:
    """Parse a registered name: a Named, `name`, `(name, scale)` or `{"name": …, "scale": …}`.

    Raises:
        SpecError: the value has another form, or the name is invalid.
    """
    if _is_pair(value):
        return Named(*value)  # type: ignore[misc]
    if not isinstance(value, (str, Named, Mapping)):
        raise SpecError("", f"expected {_REFERENCE}, got {kind(value)}")
    return Named.parse(value)


def narrowed(edit: Edit, phase: str | None) -> Edit:
    """Return the edit restricted to the tokens of one phase; None for every token.

    Raises:
        SpecError: the edit has another phase, or its positions have no token of this phase.
    """
    own = edit.positions.phase
    if own not in ("all", phase):
        tokens = "every token" if phase is None else f'"{phase}" tokens'
        raise SpecError(
            "phase", f'"{own}" contradicts the tier, which is for {tokens}; use `{own}`'
        )
    return edit if phase is None else changed(edit, phase=phase)


def changed(edit: Edit, **place: object) -> Edit:
    """Return the edit with other `positions` or `phase`; for a Gate, those of its inner edit."""
    if isinstance(edit, Gate):
        return dataclasses.replace(edit, edit=edit.edit.replace(**place))
    return edit.replace(**place)


def _is_pair(value: object) -> bool:
    """Whether `value` is `(name, scale)`, which is a list in JSON."""
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], numbers.Real)
    )


def _read_one(value: object, phase: str | None) -> tuple[Part, ...]:
    if isinstance(value, Edit):
        return (Part("", narrowed(value, phase)),)
    if isinstance(value, (str, Named)) or _is_pair(value):
        return (Part("", Steer(read_reference(value), phase=phase)),)
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected {_FORMS}, got {kind(value)}")
    if "op" in value:
        return (Part("", narrowed(parse_edit(value), phase)),)
    if "vector" in value:
        return (Part("", narrowed(Steer.parse(value), phase)),)
    if "name" in value:
        return (Part("", Steer(read_reference(value), phase=phase)),)
    return read_hooks(value, phase)
