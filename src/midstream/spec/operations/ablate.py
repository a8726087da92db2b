"""Taking directions out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.ops.layout import Op
from midstream.spec.algebra import float32, orthonormal
from midstream.spec.instructions import Instruction
from midstream.spec.matrix import read_directions
from midstream.spec.named_vector import Named
from midstream.spec.operation import Operation, one_edit, read_scalar, rows_by_value
from midstream.spec.vector import Vector
from midstream.validation import at


@dataclass(frozen=True, slots=True, init=False)
class Ablate(Operation):
    """Project some tokens' vectors out of a subspace: h ← h − strength · Σ ⟨h, u⟩ u, over an
    orthonormal basis u of the span of the directions.

    Arditi et al. 2024 (arXiv:2406.11717) with one direction and strength 1.

    Attributes:
        directions: each as wide as the model, or a name; linearly independent. Their lengths and
            order do not matter. The basis is worked out in float64 and rounded to float32.
        strength: 1 takes the directions out, 0 changes nothing, 2 reflects.
    """

    op = "ablate"

    directions: tuple[Vector | Named, ...]
    strength: float

    def __init__(
        self,
        directions: object,
        layer: object = None,
        strength: object = 1.0,
        site: object = None,
        positions: object = "all",
        phase: object = None,
        exclude: object = None,
    ) -> None:
        """Reads each field in any of its forms.

        Args:
            directions: one direction [width] or several [k, width]: a list, array, tensor or
                base64, with its `shape` where there are several; a name, or a list of which some
                are names.
            strength: a number.
            layer, site, positions, phase, exclude: as for Steer.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name. A direction is
                zero, or depends on those before it.
        """
        with at("directions"):
            self._set(directions=read_directions(directions))
            vectors = [each for each in self.directions if isinstance(each, Vector)]
            if len(vectors) == len(self.directions):
                orthonormal(tuple(vectors))
        with at("strength"):
            self._set(strength=read_scalar(strength))
        self._set_place(layer, site, positions, phase, exclude)

    def own(self) -> dict[str, Any]:
        return {"directions": self.directions, "strength": self.strength}

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        rows = rows_by_value("directions", self.directions, width)
        a = float32(-self.strength) + 0.0
        return one_edit(
            [Instruction(Op.LINEAR, read=u, write=(u,), a=a) for u in orthonormal(rows)]
        )
