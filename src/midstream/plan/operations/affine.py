"""`Affine` and `LoReFT`: affine maps of h, of low rank or by a whole matrix."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.plan import forms
from midstream.plan.argument_names import accept_spellings, only_set
from midstream.plan.instructions import Instruction
from midstream.plan.operation import (
    Operation,
    by_value,
    one_edit,
    read_norm,
    read_scalar,
    rows_by_value,
)
from midstream.plan.vectors.algebra import gram_error, wide
from midstream.plan.vectors.matrix import Matrix, matrix_by_value, read_matrix, read_rows
from midstream.plan.vectors.named_vector import Named, read_row
from midstream.plan.vectors.vector import Vector
from midstream.validation import at, float32

# Tolerance for orthonormal rows: about the error of rounding wide rows to bfloat16.
ORTHONORMAL_TO = 1e-3


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Affine(Operation):
    """Add an affine map of rank r: h ← h + scale · Σᵢ (⟨h, readᵢ⟩ + biasᵢ) · writeᵢ.

    With a matrix: h ← h + scale · (matrix · h + bias − h), matrix · h + bias if scale is 1. Such an
    edit must be the first of a token at its site. All r terms of the other form read the same h.

    Attributes:
        read: r vectors of the model's hidden size; empty with a matrix.
        write: likewise.
        bias: [r]; with a matrix of the size of h, a name, or one number for all components.
        scale: 0 changes nothing.
        norm: None or "keep".
        matrix: [width, width], or a name; None: the map is that of `read` and `write`.
    """

    op = "affine"

    read: tuple[Vector, ...]
    write: tuple[Vector, ...]
    bias: Vector | Named | float
    scale: float
    norm: str | None
    matrix: Matrix | Named | None

    @accept_spellings
    def __init__(
        self,
        read: forms.RowsLike | None = None,
        write: forms.RowsLike | None = None,
        layer: forms.LayersLike | None = None,
        bias: forms.NumberLike | forms.VectorOrName = 0.0,
        scale: forms.NumberLike = 1.0,
        site: forms.SitesLike | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
        norm: Literal["keep"] | None = None,
        head: forms.IndicesLike | None = None,
        matrix: forms.MatrixOrName | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            read, write: [r, width], or [width] for r = 1: lists, 2-D arrays or tensors, or base64
                with `shape`.
            bias: [r], any form of Vector.parse, or one number for all rows. With a matrix [width],
                one number for all components, or the name of registered vectors.
            scale: a number.
            layer, site, positions, phase, exclude, head: see Steer. No `head` with a matrix.
            norm: None, or "keep": the vector is rescaled to the norm that h had, as in Steer.
            matrix: instead of `read` and `write`: [width, width], a 2-D array or tensor, rows, or
                base64 with `shape`; or the name of registered matrices, which has one for each of
                its layers.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        if matrix is None:
            self._read_rank(read, write, bias)
        else:
            for name, value in (("read", read), ("write", write), ("head", head)):
                if value is not None:
                    raise SpecError(name, "unsupported with `matrix`, which maps the whole vector")
            with at("matrix"):
                self._set(matrix=read_matrix(matrix), read=(), write=())
            self._read(_read_shift, bias=bias)
        self._read(read_scalar, scale=scale)
        self._set(norm=read_norm(norm))
        self._set_place(layer, site, positions, phase, exclude, head)

    def _read_rank(self, read: object, write: object, bias: object) -> None:
        if read is None:
            raise SpecError("read", "missing; give `read` and `write`, or `matrix`")
        if write is None:
            raise SpecError("write", "missing; give as many rows as in `read`")
        self._read(read_rows, read=read)
        with at("write"):
            self._set(write=_read_like(write, "read", self.read))
        with at("bias"):
            self._set(bias=_read_bias(bias, len(self.read)), matrix=None)

    def own(self) -> dict[str, Any]:
        what: dict[str, Any] = {"matrix": self.matrix}
        if self.matrix is None:
            what = {"read": self.read, "write": self.write}
        return {**what, "bias": self.bias, "scale": self.scale, **only_set(norm=self.norm)}

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        if self.matrix is not None:
            return one_edit([self._map(self.matrix, width)], self.norm)
        assert isinstance(self.bias, Vector)
        reads = rows_by_value("read", self.read, width)
        writes = rows_by_value("write", self.write, width)
        return _rank_one_terms(reads, writes, self.bias, float32(self.scale), self.norm)

    def _map(self, matrix: Matrix | Named, width: int) -> Instruction:
        with at("matrix"):
            known = matrix_by_value(matrix, width)
        with at("bias"):
            if isinstance(self.bias, float):
                shift = Vector.parse([self.bias] * width)
            else:
                shift = by_value(self.bias, width)
        return Instruction(Op.MAP, read=known.flat, write=(shift,), a=float32(self.scale))


@dataclass(frozen=True, slots=True, init=False, repr=False)
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
        rotation: forms.RowsLike,
        weight: forms.RowsLike,
        bias: forms.NumberLike | forms.VectorLike,
        layer: forms.LayersLike | None = None,
        site: forms.SitesLike | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
        norm: Literal["keep"] | None = None,
        head: forms.IndicesLike | None = None,
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
        arguments = {"rotation": self.rotation, "weight": self.weight, "bias": self.bias}
        return {**arguments, **only_set(norm=self.norm)}

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
    matrix = read_rows(value)
    shapes = [[len(vectors), vectors[0].size] for vectors in (rows, matrix)]
    if shapes[0] != shapes[1]:
        raise SpecError("", f"expected the shape of `{other}`, {shapes[0]}, got {shapes[1]}")
    return matrix


def _read_shift(value: object) -> Vector | Named | float:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return read_scalar(value)
    return read_row(value)


def _read_bias(value: object, rank: int) -> Vector:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return Vector.parse([read_scalar(value)] * rank)
    bias = Vector.parse(value)
    if bias.size != rank:
        raise SpecError("", f"expected {rank} numbers, one per row, got {bias.size}")
    return bias
