"""`Reading`: what a `Gate` reads, at one tap or in several layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex

from midstream.errors import SpecError
from midstream.plan.argument_names import FrozenFields, accept_spellings, parameters_of, read_named
from midstream.plan.forms import LayersLike, NumberLike, RowsOrNames, SitesLike
from midstream.plan.heads import head_size, padded, read_indices
from midstream.plan.operation import SITE, Operation, by_value, read_scalar
from midstream.plan.positions.positions import Positions
from midstream.plan.selection import LOGITS, Layers, Sites, read_taps
from midstream.plan.shape import VectorSize
from midstream.plan.vectors.matrix import emit_rows, is_matrix
from midstream.plan.vectors.named_lookup import Registered, pick
from midstream.plan.vectors.named_vector import Named, read_direction
from midstream.plan.vectors.row_per_layer import check_per_layer, is_by_layer, read_per_layer
from midstream.plan.vectors.vector import Vector
from midstream.sites import ENDS, Tap
from midstream.validation import at

_LATE = (
    "a gate cannot read attention: its weights are computed after the forward pass, when the edit "
    "has been applied; give a direction"
)
_MLP = (
    "a gate reads a direction, and an MLP only Probe(mlp=…) reads; with act=Switch(edits=…) it "
    "applies the edits from the next token on"
)
_ONE_NUMBER = (
    "a gate reads ⟨h, direction⟩ + bias of the token alone; with act=Switch(edits=…) such a probe "
    "applies the edits from the next token on"
)
# Fields of a probe that a gate cannot read, and why.
_UNREAD = {
    "attention": _LATE,
    "mlp": _MLP,
    **dict.fromkeys(("classes", "attention_pool", "link", "pool"), _ONE_NUMBER),
}


@dataclass(frozen=True, slots=True, init=False)
class Reading(FrozenFields):
    """The probe of a gate: score = ⟨h, direction⟩ + bias, or the sum of ⟨h, direction⟩ over layers.

    Attributes:
        direction: a vector of the size of those that are read, or a name; with `head`, of a head's;
            of several layers a tuple of one vector per layer.
        bias: in units of the score.
        head: the attention head whose part of h is read; None: all of h is.
        tap: (canonical site, layer) at which h is read; layer −1 is the last. None: the tap of
            the edit, with earlier edits applied. Of several layers, the first that is listed.
        layers: the layers, if there are several; the gate applies at the last of them, or later.
    """

    direction: Vector | Named | tuple[Vector, ...]
    bias: float
    head: int | None
    tap: Tap | None
    layers: tuple[int, ...]

    @accept_spellings
    def __init__(
        self,
        direction: RowsOrNames,
        bias: NumberLike = 0.0,
        layer: LayersLike | None = None,
        site: SitesLike | None = None,
        head: SupportsIndex | None = None,
    ) -> None:
        """Create a reading; each field accepts any of its forms.

        Args:
            direction: any form of Vector.parse, or a name; for several layers a matrix with one row
                per layer, `{layer: vector}`, or a name that is registered for all of them.
            bias: a number.
            layer: an int, or a list; None: the tap of the edit.
            site: a site's name or alias, only with `layer` unless it has none; default
                "resid_post".
            head: the attention head that is read, where the vectors are of heads. None: all.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        if is_by_layer(direction) or is_matrix(direction):
            rows, layer = read_per_layer("direction", direction, layer)
            self._set(direction=rows)
        else:
            self._read(read_direction, direction=direction)
        self._read(read_scalar, bias=bias)
        heads = () if head is None else read_indices(head, "head")
        if len(heads) > 1:
            raise SpecError("head", f"a gate reads one head, got {len(heads)}")
        tap: Tap | None = None
        several: tuple[int, ...] = ()
        layers, sites = read_taps(layer, site, "layer", "site")
        if sites is not None and not sites.in_layers:
            if len(sites) > 1:
                raise SpecError("site", f"a gate reads one site, got {len(sites)}")
            if "logits" in sites:
                raise SpecError("site", LOGITS)
            tap = sites.names[0], ENDS[sites.names[0]]
        elif layers is not None:
            several = self._check_layers(layers)
            if sites is not None and len(sites) > 1:
                raise SpecError("site", f"a gate reads one site, got {len(sites)}")
            assert layers.indices != "all"
            tap = (SITE if sites is None else sites.names[0], layers.indices[0])
        elif sites is not None:
            raise SpecError(
                "layer", "missing: `site` requires `layer`; omit both to read the edit's own tap"
            )
        if isinstance(self.direction, tuple) and not several:
            raise SpecError(
                "layer", "missing: the direction has one row for each of several layers"
            )
        self._set(head=heads[0] if heads else None, tap=tap, layers=several)

    def _check_layers(self, layers: Layers) -> tuple[int, ...]:
        """Return the layers if there are several, each with its own vector."""
        if isinstance(self.direction, tuple):
            check_per_layer("direction", len(self.direction), layers)
        if layers.indices == "all":
            raise SpecError("layer", 'expected one or several layers, got "all"')
        if len(layers.indices) == 1:
            return ()
        if isinstance(self.direction, Vector):
            raise SpecError(
                "direction",
                f"expected one row per layer, [{len(layers.indices)}, width], got one vector",
            )
        return layers.indices

    @staticmethod
    def parse(value: object) -> Reading:
        """Read a Reading, a Probe of all positions, a direction, or a dict of the arguments."""
        if isinstance(value, Reading):
            return value
        if isinstance(value, Operation) and not value.op:
            return _from_probe(value)
        direction: Any = value
        if isinstance(value, Mapping):
            for name, problem in _UNREAD.items():
                if name in value:
                    raise SpecError(name, problem)
        if isinstance(value, Mapping) and not {"f32", "name"} & set(value):
            return Reading(**read_named(value, *parameters_of(Reading)))
        return Reading(direction)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        direction = self.direction
        rows = emit_rows(direction) if isinstance(direction, tuple) else direction.emit()
        fields: dict[str, object] = {"direction": rows, "bias": self.bias}
        if self.head is not None:
            fields["head"] = self.head
        if self.tap is not None:
            fields |= {"layer": self.tap[1], "site": self.tap[0]}
            if self.layers:
                fields["layer"] = list(self.layers)
            if self.tap[0] in ENDS:
                del fields["layer"]
        return fields

    def at_tap(self, direction: Vector, tap: Tap | None) -> Reading:
        """Return a copy with the direction by value, read at `tap`."""
        site, layer = (None, None) if tap is None else (Sites(tap[0]), tap[1])
        layer = None if tap is not None and tap[0] in ENDS else layer
        return Reading(direction, self.bias, layer, site, self.head)

    def at_layers(self, name: str, registered: Registered, layers: Layers) -> Reading:
        """Return a copy of several layers with the vectors of a name, which must have all."""
        assert self.tap is not None
        assert layers.indices != "all"
        site = self.tap[0]
        rows = {layer: pick(name, registered, (site, layer)) for layer in layers.indices}
        return Reading(rows, self.bias, None, Sites(site), self.head)

    def vector(self, size: VectorSize, row: int = 0) -> Vector:
        """Return the direction, of the layer `row`, for vectors of a size: its head's part."""
        direction = self.direction
        direction = direction[row] if isinstance(direction, tuple) else direction
        if self.head is None:
            with at("direction"):
                return by_value(direction, size)
        part = head_size((self.head,), size, where="the site that it reads")
        with at("direction"):
            return padded(by_value(direction, part), self.head, size)


def _from_probe(probe: Any) -> Reading:
    """Return the reading of a `Probe`. Its module imports this one."""
    for name, problem in _UNREAD.items():
        if name in probe.own():
            raise SpecError(name, problem)
    if probe.positions != Positions("all"):
        raise SpecError(
            "positions", "a gate uses the edit's positions; give a probe without positions"
        )
    layers = probe.layers.indices
    layer = None if "layer" in probe.left or layers == "all" else layers
    named = layer is not None or not probe.sites.in_layers
    site = probe.sites.names[0] if named and "site" not in probe.left else None
    return Reading(probe.direction, probe.bias, layer, site, *probe.heads)
