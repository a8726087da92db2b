"""`Scale`: multiplying h by a number, or each component by its own, and shifting it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.ops.layout import Op
from midstream.plan import forms
from midstream.plan.argument_names import accept_spellings, only_set
from midstream.plan.heads import read_indices, with_dims
from midstream.plan.instructions import Instruction
from midstream.plan.operation import Operation, by_value, one_edit, read_scalar
from midstream.plan.vectors.vector import Vector
from midstream.validation import at, float32


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Scale(Operation):
    """Multiply the selected tokens' vectors by a number, or by one for each component, and add a
    shift: h ← factor · h + shift.

    At `attn_out` or `mlp_out`, factor 0 removes that branch's contribution (zero ablation). With a
    factor and a shift for each component this is Linear-AcT, Rodríguez et al. 2024
    (arXiv:2410.23054).

    Attributes:
        factor: 1 changes nothing; a number, or a vector of the size of h.
        shift: a vector of that size; None: 0.
        dims: the components that are changed; empty: all.
    """

    op = "scale"

    factor: float | Vector
    shift: Vector | None
    dims: tuple[int, ...]

    @accept_spellings
    def __init__(
        self,
        factor: forms.NumberLike | forms.VectorLike,
        layer: forms.LayersLike | None = None,
        site: forms.SitesLike | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
        head: forms.IndicesLike | None = None,
        dims: forms.IndicesLike | None = None,
        shift: forms.VectorLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            factor: a number, or any form of Vector.parse: a number for each component.
            layer, site, positions, phase, exclude, head: see Steer.
            dims: components of the vector, counted from 0: only these are changed; with `head`, of
                a head's vector. None: all.
            shift: any form of Vector.parse, added to the product. None: nothing is.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        self._read(_read_factor, factor=factor)
        self._read_given(Vector.parse, shift=shift)
        self._set(dims=() if dims is None else read_indices(dims, "dims"))
        self._set_place(layer, site, positions, phase, exclude, head)

    def own(self) -> dict[str, Any]:
        return {"factor": self.factor, **only_set(shift=self.shift, dims=list(self.dims))}

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        if isinstance(self.factor, Vector):
            with at("factor"):
                steps = [Instruction(Op.MULTIPLY, write=(by_value(self.factor, width),), a=1.0)]
        else:
            steps = [Instruction(Op.SCALE, a=float32(self.factor))]
        if self.shift is not None:
            with at("shift"):
                steps.append(Instruction(Op.ADD, write=(by_value(self.shift, width),), a=1.0))
        return one_edit([with_dims(step, self.dims, width) for step in steps])


def _read_factor(value: object) -> float | Vector:
    is_several = isinstance(value, (Vector, Mapping, list, tuple)) or (
        len(getattr(value, "shape", ())) == 1 and len(value) > 1  # type: ignore[arg-type]
    )
    return Vector.parse(value) if is_several else read_scalar(value)
