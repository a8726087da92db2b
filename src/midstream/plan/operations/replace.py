"""`Replace`: replacing h by given vectors (activation patching)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from midstream.ops.layout import Flags, Op
from midstream.plan import forms
from midstream.plan.argument_names import accept_spellings, only_set
from midstream.plan.captured_rows import CapturedRows, is_captured, not_here
from midstream.plan.heads import read_indices, with_dims
from midstream.plan.instructions import Instruction
from midstream.plan.operation import Operation, one_edit, read_norm, read_scalar, rows_by_value
from midstream.plan.vectors.matrix import read_rows_or_names
from midstream.plan.vectors.named_vector import Named
from midstream.plan.vectors.vector import Vector
from midstream.validation import MAX_ITEMS, at, float32


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Replace(Operation):
    """Replace h by given vectors, or interpolate: h ← (1 − alpha) · h + alpha · row.

    With rows captured from another prompt this is activation patching: Vig et al. 2020
    (arXiv:2004.12265), Meng et al. 2022 (arXiv:2202.05262), Wang et al. 2022 (arXiv:2211.00593).

    Attributes:
        rows: vectors of the model's hidden size, or names: one for all selected tokens, or one per
            selected token, in the order of `positions`; or a reference to rows that a server has.
        alpha: 1 replaces, 0 changes nothing.
        norm: None or "keep".
        dims: the components that are replaced; empty: all.
    """

    op = "replace"

    rows: tuple[Vector | Named, ...] | CapturedRows
    alpha: float
    norm: str | None
    dims: tuple[int, ...]

    @accept_spellings
    def __init__(
        self,
        rows: forms.RowsOrNames | CapturedRows,
        layer: forms.LayersLike | None = None,
        alpha: forms.NumberLike = 1.0,
        site: forms.SitesLike | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
        norm: Literal["keep"] | None = None,
        head: forms.IndicesLike | None = None,
        dims: forms.IndicesLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            rows: [width] or [n, width], n at most 4096: a list, array or tensor, or base64 with
                `shape`. Any row may be the name of a registered vector, which has one for each of
                its layers: `Replace("mean", layer="all")`. In a request to a server also a
                CapturedRows: rows that the server cached for an earlier request.
            alpha: a number.
            layer, site, positions, phase, exclude, head: see Steer. n > 1 rows require n selected
                positions, which get them in the order in which they are listed; this is checked
                when the plan is resolved.
            norm: None, or "keep": the vector is rescaled to the norm that h had, as in Steer; with
                `dims`, these components to the norm that they had.
            dims: components of the vector, counted from 0: only these are replaced; rows have all
                components. None: all.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("rows"):
            if is_captured(rows):
                self._set(rows=CapturedRows.parse(rows))
            else:
                self._set(rows=read_rows_or_names(rows, MAX_ITEMS))
        self._read(read_scalar, alpha=alpha)
        self._set(norm=read_norm(norm))
        self._set(dims=() if dims is None else read_indices(dims, "dims"))
        self._set_place(layer, site, positions, phase, exclude, head)

    def own(self) -> dict[str, Any]:
        settings = only_set(norm=self.norm, dims=list(self.dims))
        return {"rows": self.rows, "alpha": self.alpha, **settings}

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        if isinstance(self.rows, CapturedRows):
            raise not_here()
        rows = rows_by_value("rows", self.rows, width)
        flags = Flags.ROW_BY_POSITION if len(rows) > 1 else Flags.NONE
        step = Instruction(Op.REPLACE, write=rows, a=float32(self.alpha), flags=flags)
        return one_edit([with_dims(step, self.dims, width)], self.norm)
