"""Edits that depend on what a probe reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.sites import Tap
from midstream.spec.algebra import float32
from midstream.spec.instructions import Instruction
from midstream.spec.named_lookup import (
    Lookup,
    Registered,
    from_start,
    index_from_start,
    is_plain,
    pick,
    taps_of,
)
from midstream.spec.named_vector import Named, read_direction
from midstream.spec.operation import SITE, by_value, read_scalar
from midstream.spec.operations.plain import PLAIN, PlainEdit, bad_edit, missing_op
from midstream.spec.positions.positions import Positions
from midstream.spec.probe import Probe
from midstream.spec.selection import Layers, Sites, read_site
from midstream.spec.vector import Vector
from midstream.validation import at, read_fields, read_int, read_word


@dataclass(frozen=True, slots=True, init=False)
class Reading:
    """What a gate looks at: score = ⟨h, direction⟩ + bias.

    Attributes:
        direction: as wide as the model, or a name.
        bias: added to the product.
        tap: (canonical site, layer) at which h is read, −1 being the last layer. None: where the
            edit is, when its turn comes.
    """

    direction: Vector | Named
    bias: float
    tap: Tap | None

    def __init__(
        self,
        direction: object,
        bias: object = 0.0,
        layer: object = None,
        site: object = None,
    ) -> None:
        """Reads each field in any of its forms.

        Args:
            direction: what Vector.parse takes, or a name.
            bias: a number.
            layer: an int; None: where the edit is.
            site: a site's name or alias, with `layer` only; "resid_post" if left out.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("direction"):
            object.__setattr__(self, "direction", read_direction(direction))
        with at("bias"):
            object.__setattr__(self, "bias", read_scalar(bias))
        tap = None
        if layer is not None:
            with at("layer"):
                index = read_int(layer)
            with at("site"):
                tap = (SITE if site is None else read_site(site), index)
        elif site is not None:
            raise SpecError(
                "layer", "missing: `site` needs it; leave out both to read where the edit is"
            )
        object.__setattr__(self, "tap", tap)

    @staticmethod
    def parse(value: object) -> Reading:
        """A Reading; a Probe of all positions; a direction; or a dict of the arguments.

        Raises:
            SpecError: something else, or a field is unknown, missing or malformed.
        """
        if isinstance(value, Reading):
            return value
        if isinstance(value, Probe):
            return _of_probe(value)
        if isinstance(value, Mapping) and not {"f32", "name"} & set(value):
            return Reading(
                **read_fields(value, required=("direction",), optional=("bias", "layer", "site"))
            )
        return Reading(value)

    def to_dict(self) -> dict[str, object]:
        """The JSON form, which `parse` reads back."""
        found: dict[str, object] = {"direction": self.direction.emit(), "bias": self.bias}
        if self.tap is not None:
            found |= {"layer": self.tap[1], "site": self.tap[0]}
        return found

    def at_tap(self, direction: Vector, tap: Tap | None) -> Reading:
        """The same by value, read at a tap."""
        site, layer = (None, None) if tap is None else tap
        return Reading(direction, self.bias, layer, site)


@dataclass(frozen=True, slots=True, init=False)
class Gate:
    """Carry out an edit only where, or as far as, a probe fires.

    With score = ⟨h, direction⟩ + bias, the amount that the edit adds is multiplied by g: 1 where
    score > threshold, else 0; or with a sharpness, g = σ(sharpness · (score − threshold)). For
    `Steer(norm="keep")` it is the scale that g multiplies. Lee et al. 2024 (conditional
    activation steering, arXiv:2409.05907).

    Attributes:
        edit: any edit but a Gate. Where it applies is where the Gate does.
        probe: what is read, and where. A tap of its own must not come after any of the edit's in
            the forward pass, which is checked when the model is known.
        threshold: in units of the score.
        sharpness: not 0; None: a step.
    """

    op: ClassVar[str] = "gate"

    edit: PlainEdit
    probe: Reading
    threshold: float
    sharpness: float | None

    def __init__(
        self, edit: object, probe: object, threshold: object = 0.0, sharpness: object = None
    ) -> None:
        """Reads each field in any of its forms.

        Args:
            edit: an edit, or a dict with `op`.
            probe: what Reading.parse takes: a direction, a dict of `direction`, `bias`, `layer`
                and `site`, or a Probe.
            threshold: a number.
            sharpness: a number, or None.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("edit"):
            object.__setattr__(self, "edit", _read_inner(edit))
        with at("probe"):
            object.__setattr__(self, "probe", Reading.parse(probe))
        with at("threshold"):
            object.__setattr__(self, "threshold", read_scalar(threshold))
        with at("sharpness"):
            found = None if sharpness is None else read_scalar(sharpness)
            if found is not None and float32(found) == 0:
                raise SpecError("", "0 is ½ whatever the score; leave it out for a step")
            object.__setattr__(self, "sharpness", found)

    @property
    def layers(self) -> Layers:
        """The edit's."""
        return self.edit.layers

    @property
    def sites(self) -> Sites:
        """The edit's."""
        return self.edit.sites

    @property
    def positions(self) -> Positions:
        """The edit's."""
        return self.edit.positions

    @property
    def left(self) -> tuple[str, ...]:
        """The edit's."""
        return self.edit.left

    @staticmethod
    def parse(value: object) -> Gate:
        """A Gate, or a dict of the constructor's arguments and optionally `"op": "gate"`.

        Raises:
            SpecError: a field is unknown, missing or malformed.
        """
        if isinstance(value, Gate):
            return value
        given = read_fields(
            value, required=("edit", "probe"), optional=("threshold", "sharpness", "op")
        )
        with at("op"):
            read_word(given.pop("op", Gate.op), (Gate.op,))
        return Gate(**given)

    def to_dict(self) -> dict[str, object]:
        """The JSON form, with every field, which `parse` reads back."""
        return {
            "op": self.op,
            "edit": self.edit.to_dict(),
            "probe": self.probe.to_dict(),
            "threshold": self.threshold,
            "sharpness": self.sharpness,
        }

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        """A GATE that reads the stream, then the edit's own instructions, GATED.

        Args:
            width: the model's hidden size.

        Raises:
            SpecError: a vector is not of that width, or is still a name.
        """
        with at("probe.direction"):
            direction = by_value(self.probe.direction, width)
        with at("edit"):
            steps = self.edit.instructions(width)
        step = self.sharpness is None
        gate = Instruction(
            Op.GATE,
            read=direction,
            a=float32(self.probe.bias),
            b=float32(self.threshold),
            c=0.0 if self.sharpness is None else float32(self.sharpness),
            flags=Flags.FRESH | (Flags.STEP if step else Flags.NONE),
        )
        # The gate has taken h already, and changes nothing.
        return (
            gate,
            *(replace(each, flags=(each.flags | Flags.GATED) & ~Flags.FRESH) for each in steps),
        )

    def names(self) -> tuple[str, ...]:
        """The names of registered vectors that it uses, each once."""
        names = dict.fromkeys(self.edit.names())
        if isinstance(self.probe.direction, Named):
            names[self.probe.direction.name] = None
        return tuple(names)

    def bind(self, lookup: Lookup, num_layers: int | None = None) -> tuple[Gate, ...]:
        """The same by value: a Gate around each edit that the edit's own `bind` gives.

        A direction that is registered for a single tap is read there, unless the probe has a tap.
        One that is registered for several is read where each edit is, with its vector there.

        Args:
            lookup, num_layers: as of Operation.bind.

        Raises:
            SpecError: a name is unknown, or has no vector for a tap that is asked for.
        """
        with at("edit"):
            edits = self.edit.bind(lookup, num_layers)
        direction = self.probe.direction
        if isinstance(direction, Vector):
            return tuple(self._around(edit, self.probe) for edit in edits)
        with at("probe"):
            with at("direction"):
                registered = lookup(direction.name)
            return tuple(
                gate
                for edit in edits
                for gate in self._bind_probe(edit, direction, registered, num_layers)
            )

    def _bind_probe(
        self,
        edit: PlainEdit,
        direction: Named,
        registered: Registered,
        num_layers: int | None,
    ) -> list[Gate]:
        tap, name = self.probe.tap, direction.name
        if tap is not None:
            tap = (tap[0], index_from_start(tap[1], num_layers))
        taps = taps_of(registered)
        if tap is None and len(taps) == 1:
            tap = taps[0]
        if tap is not None or is_plain(registered):
            vector = registered[None] if tap is None else pick(name, registered, tap)
            return [self._around(edit, self.probe.at_tap(vector, tap))]
        layers = from_start(edit.layers, num_layers).indices
        if layers == "all":
            raise SpecError(
                "layer",
                f"missing: `{name}` is registered for several layers, and the edit is at all; give "
                "the probe's layer, or list the edit's",
            )
        return [
            self._around(
                edit.replace(layer=layer, site=site),
                self.probe.at_tap(pick(name, registered, (site, layer)), None),
            )
            for layer in layers
            for site in edit.sites
        ]

    def _around(self, edit: PlainEdit, probe: Reading) -> Gate:
        return Gate(edit, probe, self.threshold, self.sharpness)


def _read_inner(value: object) -> PlainEdit:
    if isinstance(value, PlainEdit):
        return value
    known = tuple(PLAIN)
    if isinstance(value, Gate) or (isinstance(value, Mapping) and value.get("op") == Gate.op):
        raise SpecError("", "a `gate` cannot be around another `gate`; add up their directions")
    if not isinstance(value, Mapping):
        raise bad_edit(value, known)
    if "op" not in value:
        raise missing_op(known)
    with at("op"):
        word = read_word(value["op"], known)
    return PLAIN[word].parse(value)


def _of_probe(probe: Probe) -> Reading:
    if probe.positions != Positions("all"):
        raise SpecError(
            "positions", "the edit's positions are the gate's; give a probe without its own"
        )
    layers = probe.layers.indices
    layer = None if "layer" in probe.left or layers == "all" else layers[0]
    site = None if layer is None or "site" in probe.left else probe.sites.names[0]
    return Reading(probe.direction, probe.bias, layer, site)
