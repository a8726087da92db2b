"""`Steer`: adding a steering vector to h."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import ScaleWarning
from midstream.ops.layout import Flags, Op
from midstream.spec.algebra import check_nonzero, float32, unit
from midstream.spec.argument_names import accept_spellings
from midstream.spec.forms import (
    LayersLike,
    NumberLike,
    PhaseLike,
    PositionsLike,
    RowsOrNames,
    SitesLike,
)
from midstream.spec.instructions import Instruction
from midstream.spec.named_vector import Named
from midstream.spec.operation import Operation, by_value, one_edit, read_scalar
from midstream.spec.row_per_layer import check_per_layer, read_per_layer
from midstream.spec.vector import Vector
from midstream.validation import at, read_word

NORMS = ("match", "keep")
# A larger edit warns: above MAX_RMS per coordinate, a norm of MAX_RMS · √width; with norm="match",
# above MAX_MATCHED times the norm of h. Token vectors have norms of 1 to 30 per √width, a few
# massive ones excepted.
MAX_RMS = 100.0
MAX_MATCHED = 10.0
_has_warned = False


@dataclass(frozen=True, slots=True, init=False)
class Steer(Operation):
    """Add a steering vector to the selected tokens: h ← h + scale · v.

    With `norm="match"` the vector is first rescaled to the norm of h:
    h ← h + scale · (‖h‖/‖v‖) · v. With `norm="keep"` the sum is rescaled to the norm of h:
    s = h + scale · v, h ← (‖h‖/‖s‖) · s.

    Turner et al. 2023 (activation addition, arXiv:2308.10248), Rimsky et al. 2024 (contrastive
    activation addition, arXiv:2312.06681), Zou et al. 2023 (representation engineering,
    arXiv:2310.01405).

    Attributes:
        vector: v, a vector of the model's hidden size; or a name, whose scale multiplies `scale`;
            or several vectors, one per layer.
        scale: finite, within float32's range.
        norm: None, "match" or "keep".
    """

    op = "steer"

    vector: Vector | Named | tuple[Vector, ...]
    scale: float
    norm: str | None

    @accept_spellings
    def __init__(
        self,
        vector: RowsOrNames,
        layer: LayersLike | None = None,
        scale: NumberLike = 1.0,
        site: SitesLike | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        norm: Literal["match", "keep"] | None = None,
        exclude: PositionsLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            vector: any form of Vector.parse, not zero: a list, array, tensor or base64; or the
                name of a registered vector, as `str`, Named or `{"name": …, "scale": …}`. Or one
                vector per layer: `{layer: vector}` without `layer`, or a matrix with as many rows
                as there are layers.
            layer: "all", an int, or a list, tuple or range of ints. May be omitted for a name:
                see `bind`.
            scale: a number.
            site: a site's name or alias, or a list of these; default "resid_post", or for a name
                the sites it is registered for.
            positions: any form of Positions, except "last".
            phase: "prompt" or "generated" restricts the positions to tokens of that phase.
            norm: None, "match", or "keep".
            exclude: positions to exclude.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("norm"):
            self._set(norm=None if norm is None else read_word(norm, NORMS))
        found, layer = read_per_layer("vector", vector, layer)
        rows = found if isinstance(found, tuple) else (found,)
        for index, row in enumerate(rows):
            if isinstance(row, Vector):
                with at("vector" if len(rows) == 1 else f"vector[{index}]"):
                    check_nonzero(row, "the vector is zero, so that the edit would change nothing")
        self._set(vector=found)
        with at("scale"):
            self._set(scale=read_scalar(scale))
        self._set_place(layer, site, positions, phase, exclude)
        if isinstance(found, tuple):
            check_per_layer("vector", len(found), self.layers)
        self._warn_of_scale(rows)

    def own(self) -> dict[str, Any]:
        return {"vector": self.vector, "scale": self.scale, "norm": self.norm}

    def per_layer(self) -> tuple[Steer, ...]:
        if not isinstance(self.vector, tuple):
            return (self,)
        each = zip(self.vector, self.layers.indices, strict=True)
        return tuple(self.replace(vector=row, layer=layer) for row, layer in each)

    def bound(self, vectors: dict[str, Vector]) -> dict[str, object]:
        assert isinstance(self.vector, Named)
        scale = self.vector.scale * self.scale
        return {"vector": vectors[self.vector.name], "scale": scale, "norm": self.norm}

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        assert not isinstance(self.vector, tuple), "binding gives one edit per layer"
        with at("vector"):
            vector = by_value(self.vector, width)
        a = float32(self.scale)
        if self.norm == "match":
            # scale/‖v‖ as a factor would overflow for very short vectors.
            return one_edit([Instruction(Op.ADD_MATCHED, write=(unit(vector),), a=a)])
        flags = Flags.KEEP if self.norm == "keep" else Flags.NONE
        return one_edit([Instruction(Op.ADD, write=(vector,), a=a, flags=flags)])

    def _warn_of_scale(self, rows: tuple[Vector | Named, ...]) -> None:
        """Warn, once per process, of an edit that drowns the residual stream."""
        global _has_warned
        if _has_warned or self.norm == "keep":
            return
        size = abs(self.scale)
        if self.norm == "match":
            is_huge, shown = size > MAX_MATCHED, f"{size:.3g} times the norm of h"
        else:
            # All rows have one size.
            vectors = [row for row in rows if isinstance(row, Vector)]
            norm = size * max((row.norm for row in vectors), default=0.0)
            is_huge = bool(vectors) and norm > MAX_RMS * math.sqrt(vectors[0].size)
            shown = f"|scale| · ‖vector‖ = {norm:.3g}"
        if is_huge:
            _has_warned = True
            warnings.warn(
                f"Steer adds a vector with {shown}, far above the residual stream of most models, "
                "so the output is likely to be noise; a scale that is relative to the stream is "
                'norm="match" with scale=1. This is shown once per process.',
                ScaleWarning,
                stacklevel=4,
            )
