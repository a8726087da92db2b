"""`Scale`: multiplying h by a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.ops.layout import Op
from midstream.spec.algebra import float32
from midstream.spec.argument_names import accept_spellings
from midstream.spec.forms import (
    IndicesLike,
    LayersLike,
    NumberLike,
    PhaseLike,
    PositionsLike,
    SitesLike,
)
from midstream.spec.heads import read_indices, with_dims
from midstream.spec.instructions import Instruction
from midstream.spec.operation import Operation, one_edit, read_scalar
from midstream.validation import at


@dataclass(frozen=True, slots=True, init=False)
class Scale(Operation):
    """Multiply the selected tokens' vectors by a number: h ← factor · h.

    At `attn_out` or `mlp_out`, factor 0 removes that branch's contribution (zero ablation).

    Attributes:
        factor: 1 changes nothing.
        dims: the components that are multiplied; empty: all.
    """

    op = "scale"

    factor: float
    dims: tuple[int, ...]

    @accept_spellings
    def __init__(
        self,
        factor: NumberLike,
        layer: LayersLike | None = None,
        site: SitesLike | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
        head: IndicesLike | None = None,
        dims: IndicesLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            factor: a number.
            layer, site, positions, phase, exclude, head: see Steer.
            dims: components of the vector, counted from 0: only these are multiplied; with `head`,
                of a head's vector. None: all.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("factor"):
            self._set(factor=read_scalar(factor))
        self._set(dims=() if dims is None else read_indices(dims, "dims"))
        self._set_place(layer, site, positions, phase, exclude, head)

    def own(self) -> dict[str, Any]:
        return {"factor": self.factor} | ({"dims": list(self.dims)} if self.dims else {})

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        step = Instruction(Op.SCALE, a=float32(self.factor))
        return one_edit([with_dims(step, self.dims, width)])
