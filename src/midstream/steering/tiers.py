"""Server-wide edits for every request of an engine, in three additive tiers."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from midstream.errors import SpecError
from midstream.plan.argument_names import accept_spellings
from midstream.plan.operations import Gate
from midstream.plan.plan import ServerWide, emit_server_wide
from midstream.plan.positions.positions import Positions
from midstream.plan.probe import Probe
from midstream.steering.changes import Changes
from midstream.steering.edit_forms import TIERS, bind_tier, read_tier
from midstream.steering.guard_definition import is_probe_of_guard
from midstream.steering.listing import html_table, text_table
from midstream.steering.registry import VectorRegistry
from midstream.validation import at

_HEADINGS = ("tier", "op", "taps", "scale", "norm", "positions")
_SHOWN_TAPS = 3


@dataclass(frozen=True, slots=True)
class SteeringState:
    """The active edits and probes of each tier, by value."""

    base: tuple[ServerWide, ...] = ()
    prompt: tuple[ServerWide, ...] = ()
    generated: tuple[ServerWide, ...] = ()
    epoch: int = 0
    digest: str = hashlib.sha256(b"[]").hexdigest()  # of all edits
    # All edits and probes, in the order in which they are applied.
    edits: tuple[ServerWide, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "edits", (*self.base, *self.prompt, *self.generated))

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, including the vectors."""
        tiers = {tier: [emit_server_wide(edit) for edit in getattr(self, tier)] for tier in TIERS}
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
    """`llm.steering`: edits that are applied to every request before its own, and probes that read
    every request, such as guards that stop it. Thread-safe.

    A request keeps the edits that are active at its admission.
    """

    def __init__(self, registry: VectorRegistry) -> None:
        """Create empty tiers, whose edits must fit the model of a registry."""
        self._registry = registry
        # Where changes hold; `shared_folder` replaces it, and the state.
        self.changes = Changes()
        self.state = SteeringState()
        self._lock = threading.Lock()

    @accept_spellings
    def set(
        self, base: object = None, *, prompt: object = None, generated: object = None
    ) -> SteeringState:
        """Replace the given tiers atomically; other tiers stay unchanged.

        Tiers are additive: a prompt token gets the edits of `base` and `prompt`, a generated token
        those of `base` and `generated`.

        Args:
            base, prompt, generated: an edit or its dict; a Probe, or its dict with `"op": "probe"`,
                whose name no other probe of the tiers has; a registered name; `(name, scale)`;
                `{"post_block": {15: vector}}` or `{15: vector}`, where a vector may be
                `{"vector": …, "scale": …}`; or a list of these. `[]` clears the tier; None leaves
                it unchanged. A name is resolved now: registering it again has no effect on the
                tier until the tier is set again.
        """
        tiers = {"base": base, "prompt": prompt, "generated": generated}
        tiers = {tier: value for tier, value in tiers.items() if value is not None}
        if not tiers:
            raise SpecError("", "no tier is given; expected base=, prompt= or generated=")
        read: dict[str, tuple[ServerWide, ...]] = {}
        for tier, value in tiers.items():
            with at(tier):
                parts = read_tier(value, TIERS[tier])
                read[tier] = tuple(bind_tier(parts, self._registry.lookup, self._registry.shape))
        return self._change(read)

    def clear(self) -> SteeringState:
        """Clear all tiers; return the new state."""
        return self._change(dict.fromkeys(TIERS, ()))

    def show(self) -> SteeringState:
        """Return the active edits; prints as a table."""
        self.changes.refresh()
        return self.state

    def plan_edits(self) -> tuple[ServerWide, ...]:
        """Return the edits and probes that a request admitted now gets before its own."""
        self.changes.refresh()
        return self.state.edits

    @property
    def epoch(self) -> int:
        """How often the tiers were changed."""
        return self.show().epoch

    @property
    def digest(self) -> str:
        """SHA-256 of the active edits, in hex."""
        return self.show().digest

    def __bool__(self) -> bool:
        return bool(self.show().edits)

    def __str__(self) -> str:
        return str(self.show())

    def __repr__(self) -> str:
        return f"Steering({len(self.show().edits)} edits)"

    def _repr_html_(self) -> str:
        return self.show()._repr_html_()

    def _change(self, tiers: Mapping[str, tuple[ServerWide, ...]]) -> SteeringState:
        with self._lock, self.changes.changing():
            before = self.state
            new = {tier: getattr(before, tier) for tier in TIERS} | dict(tiers)
            _check_names(new)
            state = SteeringState(**new, epoch=before.epoch + 1, digest=_digest(new))
            self.state = state
        return state


def _check_names(tiers: Mapping[str, tuple[ServerWide, ...]]) -> None:
    """Check that no two probes of the tiers have one name."""
    owner: dict[str, str] = {}
    for tier in TIERS:
        for index, part in enumerate(tiers[tier]):
            if isinstance(part, Probe):
                place = f"{tier}[{index}]"
                if is_probe_of_guard(part.name):
                    raise SpecError(
                        f"{place}.name",
                        f"names that begin as `{part.name}` are those of the server's guards; use "
                        "another name",
                    )
                if owner.setdefault(part.name, place) != place:
                    raise SpecError(
                        f"{place}.name",
                        f"`{part.name}` is already the name of {owner[part.name]}; use another "
                        "name",
                    )


def _digest(tiers: Mapping[str, tuple[ServerWide, ...]]) -> str:
    content = [[tier, emit_server_wide(edit)] for tier in TIERS for edit in tiers[tier]]
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()


def _cells(edit: ServerWide) -> tuple[str, ...]:
    if isinstance(edit, Probe):
        what = f"probe: {edit.name}" if edit.act is None else f"{edit.act.word}: {edit.name}"
        return what, _show_taps(edit), "", "", _show_positions(edit.positions)
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


def _show_taps(edit: ServerWide) -> str:
    indices = edit.layers.indices
    layers = ["all"] if indices == "all" else [str(index) for index in indices]
    taps = [f"{site}.{layer}" for layer in layers for site in edit.sites]
    taps = taps if edit.sites.in_layers else list(edit.sites)
    more = f", … ({len(taps)})" if len(taps) > _SHOWN_TAPS else ""
    return ", ".join(taps[:_SHOWN_TAPS]) + more


def _show_positions(positions: Positions) -> str:
    text = ", ".join(map(str, positions.include))
    if positions.exclude:
        text += f", but {', '.join(map(str, positions.exclude))}"
    return text if positions.phase == "all" else f"{positions.phase}: {text}"
