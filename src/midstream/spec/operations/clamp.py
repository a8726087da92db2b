"""Bringing the coordinate along a direction into a range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.spec.algebra import check_nonzero, float32, unit
from midstream.spec.instructions import Instruction
from midstream.spec.named_vector import Named, read_direction
from midstream.spec.operation import Operation, by_value, one_edit, read_scalar
from midstream.spec.vector import Vector
from midstream.validation import FLOAT32_MAX, at


@dataclass(frozen=True, slots=True, init=False)
class Clamp(Operation):
    """Set the coordinate of h along a direction, or keep it within a range.

    With u = v/‖v‖ and x = ⟨h, u⟩: h ← h + strength · (clip(x, low, high) − x) · u. What is
    orthogonal to the direction stays as it is.

    Attributes:
        direction: v, as wide as the model, not zero; or a name. Its length does not matter.
        low, high: the range, in units of h; None: open. To set the coordinate is a range of one
            value, low = high.
        strength: 1 moves the coordinate all the way, 0 changes nothing.
    """

    op = "clamp"

    direction: Vector | Named
    low: float | None
    high: float | None
    strength: float

    def __init__(
        self,
        direction: object,
        layer: object = None,
        value: object = None,
        low: object = None,
        high: object = None,
        strength: object = 1.0,
        site: object = None,
        positions: object = "all",
        phase: object = None,
        exclude: object = None,
    ) -> None:
        """Reads each field in any of its forms.

        Args:
            direction: what Vector.parse takes, or a name.
            value: a number to which the coordinate is set; then neither `low` nor `high`.
            low, high: numbers, low ≤ high; at least one of them, if there is no `value`.
            strength: a number.
            layer, site, positions, phase, exclude: as for Steer.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("direction"):
            found = read_direction(direction)
            if isinstance(found, Vector):
                check_nonzero(found, "the vector is zero, which is no direction")
            self._set(direction=found)
        if value is not None:
            for name, bound in (("low", low), ("high", high)):
                if bound is not None:
                    raise SpecError(name, "give either `value`, or `low` and `high`")
            with at("value"):
                low = high = read_scalar(value)
        elif low is None and high is None:
            raise SpecError("", "nothing to clamp to: give `value`, `low` or `high`")
        for name, bound in (("low", low), ("high", high)):
            with at(name):
                self._set(**{name: None if bound is None else read_scalar(bound)})
        if self.low is not None and self.high is not None and self.low > self.high:
            raise SpecError("low", f"expected at most `high`, {self.high!r}, got {self.low!r}")
        with at("strength"):
            self._set(strength=read_scalar(strength))
        self._set_place(layer, site, positions, phase, exclude)

    def own(self) -> dict[str, Any]:
        return {
            "direction": self.direction,
            "low": self.low,
            "high": self.high,
            "strength": self.strength,
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
                    # No coordinate is past the largest float32, and it can be written as JSON.
                    a=-FLOAT32_MAX if self.low is None else float32(self.low),
                    b=FLOAT32_MAX if self.high is None else float32(self.high),
                    c=float32(self.strength),
                )
            ]
        )
