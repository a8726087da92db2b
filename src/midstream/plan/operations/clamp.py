"""`Clamp`: clipping or setting the coordinate of h along a direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.plan import forms
from midstream.plan.argument_names import accept_spellings, only_set
from midstream.plan.instructions import Instruction
from midstream.plan.operation import Operation, by_value, one_edit, read_norm, read_scalar
from midstream.plan.vectors.algebra import check_nonzero, unit
from midstream.plan.vectors.named_vector import Named, read_direction
from midstream.plan.vectors.vector import Vector
from midstream.validation import FLOAT32_MAX, at, float32


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Clamp(Operation):
    """Set the coordinate of h along a direction, or clip it to a range.

    With u = v/‖v‖ and x = ⟨h, u⟩: h ← h + strength · (clip(x, low, high) − x) · u. The component
    orthogonal to the direction is unchanged.

    Attributes:
        direction: v, a nonzero vector of the model's hidden size, or a name. Its length has no
            effect.
        low, high: the range, in units of h; None: unbounded. Equal bounds set the coordinate.
        strength: 1 moves the coordinate fully, 0 changes nothing.
        norm: None or "keep".
    """

    op = "clamp"

    direction: Vector | Named
    low: float | None
    high: float | None
    strength: float
    norm: str | None

    @accept_spellings
    def __init__(
        self,
        direction: forms.VectorOrName,
        layer: forms.LayersLike | None = None,
        value: forms.NumberLike | None = None,
        low: forms.NumberLike | None = None,
        high: forms.NumberLike | None = None,
        strength: forms.NumberLike = 1.0,
        site: forms.SitesLike | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
        norm: Literal["keep"] | None = None,
        head: forms.IndicesLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            direction: any form of Vector.parse, or a name.
            value: the number to set the coordinate to; excludes `low` and `high`.
            low, high: numbers, low ≤ high; at least one of them if `value` is omitted.
            strength: a number.
            layer, site, positions, phase, exclude, head: see Steer.
            norm: None, or "keep": the vector is rescaled to the norm that h had, as in Steer.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("direction"):
            vector = read_direction(direction)
            if isinstance(vector, Vector):
                check_nonzero(vector, "the vector is zero; expected a direction")
            self._set(direction=vector)
        if value is not None:
            for name, bound in (("low", low), ("high", high)):
                if bound is not None:
                    raise SpecError(name, "give either `value`, or `low` and `high`")
            with at("value"):
                low = high = read_scalar(value)
        elif low is None and high is None:
            raise SpecError("", "missing bounds: give `value`, `low` or `high`")
        for name, bound in (("low", low), ("high", high)):
            with at(name):
                self._set(**{name: None if bound is None else read_scalar(bound)})
        if self.low is not None and self.high is not None and self.low > self.high:
            raise SpecError("low", f"expected at most `high`, {self.high!r}, got {self.low!r}")
        self._read(read_scalar, strength=strength)
        self._set(norm=read_norm(norm))
        self._set_place(layer, site, positions, phase, exclude, head)

    def own(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            "low": self.low,
            "high": self.high,
            "strength": self.strength,
            **only_set(norm=self.norm),
        }

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        with at("direction"):
            u = unit(by_value(self.direction, width))
        return one_edit(
            [
                Instruction(
                    Op.CLIP,
                    read=u,
                    write=(u,),
                    # The largest float32 bounds every coordinate and, unlike infinity, is JSON.
                    a=-FLOAT32_MAX if self.low is None else float32(self.low),
                    b=FLOAT32_MAX if self.high is None else float32(self.high),
                    c=float32(self.strength),
                )
            ],
            self.norm,
        )
