"""Putting other vectors in the place of h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.ops.layout import Flags, Op
from midstream.spec.algebra import float32
from midstream.spec.instructions import Instruction
from midstream.spec.matrix import read_rows
from midstream.spec.operation import SITE, Operation, one_edit, read_scalar, rows_by_value
from midstream.spec.vector import Vector
from midstream.validation import MAX_ITEMS, at


@dataclass(frozen=True, slots=True, init=False)
class Replace(Operation):
    """Replace some tokens' vectors by given ones, or move towards them:
    h ← (1 − alpha) · h + alpha · row.

    With rows captured from another prompt this is activation patching: Vig et al. 2020
    (arXiv:2004.12265), Meng et al. 2022 (arXiv:2202.05262), Wang et al. 2022 (arXiv:2211.00593).

    Attributes:
        rows: each as wide as the model: one for all tokens that are selected, or as many as there
            are, of which the k-th token gets the k-th.
        alpha: 1 replaces, 0 changes nothing.
    """

    op = "replace"

    rows: tuple[Vector, ...]
    alpha: float

    def __init__(
        self,
        rows: object,
        layer: object,
        alpha: object = 1.0,
        site: object = SITE,
        positions: object = "all",
        phase: object = None,
        exclude: object = None,
    ) -> None:
        """Reads each field in any of its forms.

        Args:
            rows: [width] or [n, width], n at most 4096: a list, array or tensor, or base64 with
                its `shape`.
            alpha: a number.
            layer, site, positions, phase, exclude: as for Steer. With several rows the positions
                must be as many, which is checked when the prompt's length is known.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("rows"):
            self._set(rows=read_rows(rows, MAX_ITEMS))
        with at("alpha"):
            self._set(alpha=read_scalar(alpha))
        self._set_place(layer, site, positions, phase, exclude)

    def own(self) -> dict[str, Any]:
        return {"rows": self.rows, "alpha": self.alpha}

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        rows = rows_by_value("rows", self.rows, width)
        flags = Flags.ROW_BY_POSITION if len(rows) > 1 else Flags.NONE
        return one_edit([Instruction(Op.REPLACE, write=rows, a=float32(self.alpha), flags=flags)])
