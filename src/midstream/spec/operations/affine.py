"""`Affine` and `LoReFT`: low-rank affine maps of h."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.spec.algebra import float32, gram_error, wide
from midstream.spec.argument_names import accept_spellings
from midstream.spec.forms import (
    IndicesLike,
    LayersLike,
    NumberLike,
    PhaseLike,
    PositionsLike,
    RowsLike,
    SitesLike,
    VectorLike,
)
from midstream.spec.instructions import Instruction
from midstream.spec.matrix import read_rows
from midstream.spec.operation import (
    Operation,
    one_edit,
    read_norm,
    read_scalar,
    rows_by_value,
    with_norm,
)
from midstream.spec.vector import Vector
from midstream.validation import at

# Tolerance for orthonormal rows: about the error of rounding wide rows to bfloat16.
ORTHONORMAL_TO = 1e-3


@dataclass(frozen=True, slots=True, init=False)
class Affine(Operation):
    """Add an affine map of rank r: h ← h + scale · Σᵢ (⟨h, readᵢ⟩ + biasᵢ) · writeᵢ.

    All r terms read the same h.

    Attributes:
        read: r vectors of the model's hidden size.
        write: r vectors of the model's hidden size.
        bias: [r].
        scale: 0 changes nothing.
        norm: None or "keep".
    """

    op = "affine"

    read: tuple[Vector, ...]
    write: tuple[Vector, ...]
    bias: Vector
    scale: float
    norm: str | None

    @accept_spellings
    def __init__(
        self,
        read: RowsLike,
        write: RowsLike,
        layer: LayersLike | None = None,
        bias: NumberLike | VectorLike = 0.0,
        scale: NumberLike = 1.0,
        site: SitesLike | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
        norm: Literal["keep"] | None = None,
        head: IndicesLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            read, write: [r, width], or [width] for r = 1: lists, 2-D arrays or tensors, or base64
                with `shape`.
            bias: [r], any form of Vector.parse, or one number for all rows.
            scale: a number.
            layer, site, positions, phase, exclude, head: see Steer.
            norm: None, or "keep": the vector is rescaled to the norm that h had, as in Steer.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("read"):
            self._set(read=read_rows(read))
        with at("write"):
            self._set(write=_read_like(write, "read", self.read))
        with at("bias"):
            self._set(bias=_read_bias(bias, len(self.read)))
        with at("scale"):
            self._set(scale=read_scalar(scale))
        self._set(norm=read_norm(norm))
        self._set_place(layer, site, positions, phase, exclude, head)

    def own(self) -> dict[str, Any]:
        found = {"read": self.read, "write": self.write, "bias": self.bias, "scale": self.scale}
        return with_norm(found, self.norm)

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        reads = rows_by_value("read", self.read, width)
        writes = rows_by_value("write", self.write, width)
        return _rank_one_terms(reads, writes, self.bias, float32(self.scale), self.norm)


@dataclass(frozen=True, slots=True, init=False)
class LoReFT(Operation):
    """Replace h within a learned subspace: h ← h + Rᵀ (W h + b − R h).

    Wu et al. 2024 (representation finetuning, arXiv:2404.03592). In `pyreft` R is the transpose
    of `rotate_layer.weight`; W and b are the weight and bias of `learned_source`.

    Attributes:
        rotation: R, r vectors of the model's hidden size; orthonormal to within 1e-3.
        weight: W, r vectors of the model's hidden size.
        bias: b, [r].
        norm: None or "keep".
    """

    op = "loreft"

    rotation: tuple[Vector, ...]
    weight: tuple[Vector, ...]
    bias: Vector
    norm: str | None

    @accept_spellings
    def __init__(
        self,
        rotation: RowsLike,
        weight: RowsLike,
        bias: NumberLike | VectorLike,
        layer: LayersLike | None = None,
        site: SitesLike | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
        norm: Literal["keep"] | None = None,
        head: IndicesLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            rotation, weight: [r, width], or [width] for r = 1: lists, 2-D arrays or tensors, or
                base64 with `shape`.
            bias: [r], any form of Vector.parse, or one number for all rows.
            layer, site, positions, phase, exclude, head: see Steer.
            norm: None, or "keep": the vector is rescaled to the norm that h had, as in Steer.

        Raises:
            SpecError: a field is malformed (its path starts with the field's name), or the rows
                of `rotation` are not orthonormal.
        """
        with at("rotation"):
            self._set(rotation=read_rows(rotation))
            error = gram_error(self.rotation)
            if error > ORTHONORMAL_TO:
                raise SpecError(
                    "",
                    f"expected orthonormal rows; their inner products are off by {error:.3g}, "
                    f"more than {ORTHONORMAL_TO:g}",
                )
        with at("weight"):
            self._set(weight=_read_like(weight, "rotation", self.rotation))
        with at("bias"):
            self._set(bias=_read_bias(bias, len(self.rotation)))
        self._set(norm=read_norm(norm))
        self._set_place(layer, site, positions, phase, exclude, head)

    def own(self) -> dict[str, Any]:
        found = {"rotation": self.rotation, "weight": self.weight, "bias": self.bias}
        return with_norm(found, self.norm)

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        rotation = rows_by_value("rotation", self.rotation, width)
        with at("weight"):
            rows = wide(rows_by_value("", self.weight, width)) - wide(rotation)
            reads = read_rows(rows)
        return _rank_one_terms(reads, rotation, self.bias, 1.0, self.norm)


def _rank_one_terms(
    reads: tuple[Vector, ...],
    writes: tuple[Vector, ...],
    bias: Vector,
    scale: float,
    norm: str | None,
) -> tuple[Instruction, ...]:
    return one_edit(
        [
            Instruction(Op.LINEAR, read=read, write=(write,), a=scale, b=b)
            for read, write, b in zip(reads, writes, bias.numpy().tolist(), strict=True)
        ],
        norm,
    )


def _read_like(value: object, other: str, rows: tuple[Vector, ...]) -> tuple[Vector, ...]:
    """Read rows whose shape must be that of `rows`, the rows of field `other`."""
    found = read_rows(value)
    shapes = [[len(each), each[0].size] for each in (rows, found)]
    if shapes[0] != shapes[1]:
        raise SpecError("", f"expected the shape of `{other}`, {shapes[0]}, got {shapes[1]}")
    return found


def _read_bias(value: object, rank: int) -> Vector:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return Vector.parse([read_scalar(value)] * rank)
    found = Vector.parse(value)
    if found.size != rank:
        raise SpecError("", f"expected {rank} numbers, one per row, got {found.size}")
    return found
