"""`Gate`: an edit that is conditional on a probe's score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan.argument_names import FrozenFields, accept_spellings, parameters_of, shown_names
from midstream.plan.forms import NumberLike, PlacedVector, SupportsEdit, VectorOrName
from midstream.plan.instructions import Instruction
from midstream.plan.operation import Operation, read_scalar
from midstream.plan.operations.gate_memory import Hold, Memory
from midstream.plan.operations.gate_probe import Reading
from midstream.plan.operations.plain import PLAIN, PlainEdit, read_kind
from midstream.plan.operations.route import Route
from midstream.plan.operations.steer import in_full
from midstream.plan.positions.positions import Positions
from midstream.plan.selection import Layers, Sites
from midstream.plan.shape import VectorSize
from midstream.plan.vectors.named_lookup import (
    Lookup,
    Registered,
    from_start,
    index_from_start,
    is_plain,
    pick,
    taps_of,
    vectors_of,
)
from midstream.plan.vectors.named_vector import Named
from midstream.validation import at, float32, read_fields, read_word


@dataclass(frozen=True, slots=True, init=False)
class Gate(FrozenFields):
    """Apply an edit only to tokens, or to the degree, that a probe's score exceeds a threshold.

    With score = ⟨h, direction⟩ + bias, the contribution of the edit is multiplied by g: 1 if
    score > threshold, else 0; or with a sharpness, g = σ(sharpness · (score − threshold)). For
    `Steer(norm="keep")`, g multiplies the scale. Lee et al. 2024 (conditional activation
    steering, arXiv:2409.05907).

    Attributes:
        edit: any edit but a Gate. It determines the gate's taps and positions.
        probe: the direction and tap that are read. The tap must not come after a tap of the edit
            in the forward pass; this is checked when the plan is resolved.
        threshold: in units of the score.
        sharpness: not 0; None: a step function.
        hold: once open, for how many more tokens after the last that kept it open; "rest": for all
            of the request. None: for none.
        smooth: weight of the newest score in the moving average that is compared, between 0 and 1:
            s ← s + smooth · (score − s), from the first score on. None: each score as it is.
        release: an open gate stays open as long as the score exceeds this, at most the threshold.
            None: the threshold.

    With `hold`, `smooth` or `release` a gate has memory: it goes over the tokens that the edit
    selects in their order, and reads what enters its tap, before all edits there.
    """

    op: ClassVar[str] = "gate"

    edit: PlainEdit
    probe: Reading
    threshold: float
    sharpness: float | None
    hold: Hold | None
    smooth: float | None
    release: float | None

    @accept_spellings
    def __init__(
        self,
        edit: PlainEdit | Mapping[str, Any] | SupportsEdit | PlacedVector,
        probe: Reading | Operation | VectorOrName,
        threshold: NumberLike = 0.0,
        sharpness: NumberLike | None = None,
        hold: Hold | None = None,
        smooth: NumberLike | None = None,
        release: NumberLike | None = None,
    ) -> None:
        """Create a gate; each field accepts any of its forms.

        Args:
            edit: an edit but a Gate, in any of the forms of `generate`.
            probe: any form of Reading.parse: a direction, a dict of `direction`, `bias`, `layer`,
                `site` and `head`, or a Probe of directions.
            threshold: a number.
            sharpness: a number, or None.
            hold: "rest", or a number of tokens from 1.
            smooth: a number between 0 and 1.
            release: a number, at most `threshold`.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        self._read(_read_inner, edit=edit)
        self._read(Reading.parse, probe=probe)
        self._read(read_scalar, threshold=threshold)
        self._read_given(self._read_sharpness, sharpness=sharpness)
        memory = Memory.read(hold, smooth, release, self.threshold, self.sharpness)
        if memory and self.probe.layers:
            problem = "a gate with memory (hold, smooth, release) reads one layer, got several"
            raise SpecError("probe.layer", problem)
        self._set(hold=memory.hold, smooth=memory.smooth, release=memory.release)

    def _read_sharpness(self, value: object) -> float:
        number = read_scalar(value)
        if float32(number) == 0:
            raise SpecError(
                "", "must not be 0, where the gate is always ½; omit `sharpness` for a step"
            )
        if isinstance(self.edit, Route) and self.edit.forces:
            raise SpecError(
                "", "an expert is chosen or not: omit `sharpness`, or give a Route of `bias`"
            )
        return number

    @property
    def memory(self) -> Memory:
        """What it remembers from one token to the next."""
        return Memory(self.hold, self.smooth, self.release)

    @property
    def layers(self) -> Layers:
        """The layers of the edit."""
        return self.edit.layers

    @property
    def sites(self) -> Sites:
        """The sites of the edit."""
        return self.edit.sites

    @property
    def positions(self) -> Positions:
        """The positions of the edit."""
        return self.edit.positions

    @property
    def left(self) -> tuple[str, ...]:
        """The omitted fields of the edit; see Operation."""
        return self.edit.left

    @staticmethod
    def parse(value: object) -> Gate:
        """Read a Gate, or a dict of the constructor's arguments and optionally `"op": "gate"`."""
        if isinstance(value, Gate):
            return value
        required, optional = parameters_of(Gate)
        fields = read_fields(value, required, (*optional, "op"))
        with at("op"):
            read_word(fields.pop("op", Gate.op), (Gate.op,))
        return Gate(**fields)

    def __dir__(self) -> list[str]:
        return shown_names(self)

    def to_dict(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads; `hold`, `smooth` and `release` if given."""
        return {
            "op": self.op,
            "edit": self.edit.to_dict(),
            "probe": self.probe.to_dict(),
            "threshold": self.threshold,
            "sharpness": self.sharpness,
            **self.memory.emit(),
        }

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        """Return the device instructions for vectors of one size; see `steps`."""
        return self.steps(width if isinstance(width, VectorSize) else VectorSize(width))

    def steps(
        self, size: VectorSize, read: VectorSize | None = None, row: int = 0
    ) -> tuple[Instruction, ...]:
        """Return a GATE that reads the vector, of the layer `row` of several, then the edit's steps
        GATED; `size` is that at the edit's tap, `read` that where the gate reads, if elsewhere.
        """
        with at("probe"):
            direction = self.probe.vector(size if read is None else read, row)
        with at("edit"):
            steps = self.edit.steps(size)
        step = self.sharpness is None
        gate = Instruction(
            Op.GATE,
            read=direction,
            a=float32(self.probe.bias),
            b=float32(self.threshold),
            c=0.0 if self.sharpness is None else float32(self.sharpness),
            flags=Flags.FRESH | (Flags.STEP if step else Flags.NONE),
        )
        # The GATE already read h and does not change it, so the first one need not read it again.
        first, *rest = (instruction.with_flags(Flags.GATED) for instruction in steps)
        return gate, replace(first, flags=first.flags & ~Flags.FRESH), *rest

    def names(self) -> tuple[str, ...]:
        """Return the names of the registered vectors in use, each once."""
        names = dict.fromkeys(self.edit.names())
        if isinstance(self.probe.direction, Named):
            names[self.probe.direction.name] = None
        return tuple(names)

    @property
    def is_bound(self) -> bool:
        """Whether `bind` would return the gate itself."""
        return self.edit.is_bound and not isinstance(self.probe.direction, Named)

    def bind(self, lookup: Lookup, num_layers: int | None = None) -> tuple[Gate, ...]:
        """Return one Gate per edit that binding gives. A direction registered for one tap is read
        there, unless the probe has a tap; one for several at each edit's tap, with its vector
        there.
        """
        with at("edit"):
            edits = self.edit.bind(lookup, num_layers)
        direction = self.probe.direction
        if not isinstance(direction, Named):
            return tuple(replace(self, edit=edit) for edit in edits)
        with at("probe"):
            with at("direction"):
                registered = vectors_of(direction.name, lookup)
            if self.probe.layers:
                layers = from_start(Layers(self.probe.layers), num_layers)
                probe = self.probe.at_layers(direction.name, registered, layers)
                return tuple(replace(self, edit=edit, probe=probe) for edit in edits)
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
            return [replace(self, edit=edit, probe=self.probe.at_tap(vector, tap))]
        layers = from_start(edit.layers, num_layers).indices if edit.sites.in_layers else ()
        if layers == "all":
            raise SpecError(
                "layer",
                f"missing: `{name}` is registered for several layers, but the edit has "
                "layer=\"all\"; give the probe's layer, or list the edit's layers",
            )
        return [
            replace(
                self,
                edit=edit.replace(layer=layer, site=site),
                probe=self.probe.at_tap(pick(name, registered, (site, layer)), None),
            )
            for layer in layers
            for site in edit.sites
        ]


def _read_inner(value: object) -> PlainEdit:
    if isinstance(value, PlainEdit):
        return value
    if isinstance(value, Gate) or (isinstance(value, Mapping) and value.get("op") == Gate.op):
        raise SpecError(
            "", "a `gate` cannot contain another `gate`; use the sum of their directions"
        )
    value = in_full(value)
    return value if isinstance(value, PlainEdit) else read_kind(value, PLAIN).parse(value)
