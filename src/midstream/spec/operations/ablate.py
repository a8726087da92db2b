"""`Ablate`: projecting directions out of h."""

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
    """Project the selected tokens' vectors out of a subspace: h ← h − strength · Σ ⟨h, u⟩ u.

    The sum is over an orthonormal basis u of the span of the directions. One direction with
    strength 1 is the ablation of Arditi et al. 2024 (arXiv:2406.11717).

    Attributes:
        directions: vectors of the model's hidden size, or names; linearly independent. Their
            lengths and order have no effect. The basis is computed in float64 and rounded to
            float32.
        strength: 1 removes the directions, 0 changes nothing, 2 reflects.
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
        """Create an edit; each field accepts any of its forms.

        Args:
            directions: one direction [width] or several [k, width]: a list, array, tensor or
                base64 (with `shape` for several); a name, or a list that includes names.
            strength: a number.
            layer, site, positions, phase, exclude: see Steer.

        Raises:
            SpecError: a field is malformed (its path starts with the field's name), or a direction
                is zero or linearly dependent on earlier ones.
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
