"""`Probe`: a linear score of selected tokens at one tap."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, SupportsIndex

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.spec.algebra import float32
from midstream.spec.argument_names import accept_spellings
from midstream.spec.forms import (
    LayersLike,
    NumberLike,
    PhaseLike,
    PositionsLike,
    SitesLike,
    VectorOrName,
)
from midstream.spec.instructions import Instruction
from midstream.spec.named_lookup import Lookup
from midstream.spec.named_vector import Named, read_direction
from midstream.spec.operation import Operation, by_value, read_scalar
from midstream.spec.vector import Vector
from midstream.validation import at, kind, show

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True, slots=True, init=False)
class Probe(Operation):
    """A linear probe of the selected tokens at one tap: score = ⟨h, direction⟩ + bias.

    h includes all edits at that tap. Alain and Bengio 2016 (linear probes, arXiv:1610.01644).

    Attributes:
        direction: a vector of the model's hidden size, or a name.
        bias: in units of the score.
        name: key of the scores in the output; 1 to 64 of the characters A–Z a–z 0–9 _ . : -
        layers, sites: one each.
    """

    direction: Vector | Named
    bias: float
    name: str

    @accept_spellings
    def __init__(
        self,
        direction: VectorOrName,
        layer: LayersLike | None = None,
        bias: NumberLike = 0.0,
        site: SitesLike | None = None,
        name: str | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
        head: SupportsIndex | None = None,
    ) -> None:
        """Create a probe; each field accepts any of its forms.

        Args:
            direction: any form of Vector.parse, or a name.
            layer: an int; may be omitted for the name of a vector registered for one tap.
            bias: a number.
            site: a site's name or alias; default "resid_post".
            name: None: "probe".
            positions: any form of Positions.
            phase: "prompt" or "generated" restricts the positions to tokens of that phase.
            exclude: positions to exclude.
            head: the attention head that is read, at a site whose vectors are of heads; the
                direction then has the size of a head.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("direction"):
            self._set(direction=read_direction(direction))
        with at("bias"):
            self._set(bias=read_scalar(bias))
        with at("name"):
            self._set(name="probe" if name is None else _read_name(name))
        self._set_place(layer, site, positions, phase, exclude, head, last=True)
        if len(self.heads) > 1:
            raise SpecError("head", "a probe reads one head; use one probe per head")
        layers = self.layers.indices
        several = layers == "all" or len(layers) > 1
        if several and "layer" not in self.left and self.sites.in_layers:
            shown = '"all"' if layers == "all" else f"{len(layers)} layers"
            raise SpecError(
                "layer", f"a probe reads one layer, got {shown}; use one probe per layer"
            )
        if len(self.sites) > 1:
            raise SpecError(
                "site", f"a probe reads one site, got {len(self.sites)}; use one probe per site"
            )

    def own(self) -> dict[str, Any]:
        return {"direction": self.direction, "bias": self.bias, "name": self.name}

    def bind(self, lookup: Lookup, num_layers: int | None = None) -> tuple[Probe, ...]:
        """Return the probe with its name replaced by the vector, at one tap.

        Args:
            lookup, num_layers: see Operation.bind.

        Raises:
            SpecError: the name is unknown, has no vector for the requested tap, or has several
                taps and none is requested.
        """
        # super() without arguments fails here: `slots=True` replaces the class.
        found = Operation.bind(self, lookup, num_layers)
        if len(found) > 1:
            raise SpecError(
                "layer",
                f"`{self.names()[0]}` is registered for {len(found)} taps, but a probe reads one "
                "tap; give `layer` and `site`",
            )
        return found

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        with at("direction"):
            direction = by_value(self.direction, width)
        return (
            Instruction(
                Op.PROBE,
                read=direction,
                a=float32(self.bias),
                flags=Flags.FRESH | Flags.COUNTED,
            ),
        )


def _read_name(value: object) -> str:
    if not isinstance(value, str):
        raise SpecError("", f"expected a name, `str`, got {kind(value)}")
    if not _NAME.fullmatch(value):
        raise SpecError(
            "", f"expected 1 to 64 of the characters A-Z a-z 0-9 _ . : -, got {show(value)}"
        )
    return str(value)  # of a subclass, such as NumPy's, which messages cannot have
