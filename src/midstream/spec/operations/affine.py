"""Affine maps of low rank, among them trained ones."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.spec.algebra import float32, gram_error, wide
from midstream.spec.instructions import Instruction
from midstream.spec.matrix import read_rows
from midstream.spec.operation import SITE, Operation, one_edit, read_scalar, rows_by_value
from midstream.spec.vector import Vector
from midstream.validation import at

# How far rows may be from orthonormal: about what storing them in bfloat16 does to wide ones.
ORTHONORMAL_TO = 1e-3


@dataclass(frozen=True, slots=True, init=False)
class Affine(Operation):
    """Add an affine map of rank r: h ← h + scale · Σᵢ (⟨h, readᵢ⟩ + biasᵢ) · writeᵢ.

    All r terms read the same h.

    Attributes:
        read: r rows, each as wide as the model.
        write: as many.
        bias: [r].
        scale: 0 changes nothing.
    """

    op = "affine"

    read: tuple[Vector, ...]
    write: tuple[Vector, ...]
    bias: Vector
    scale: float

    def __init__(
        self,
        read: object,
        write: object,
        layer: object,
        bias: object = 0.0,
        scale: object = 1.0,
        site: object = SITE,
        positions: object = "all",
        phase: object = None,
        exclude: object = None,
    ) -> None:
        """Reads each field in any of its forms.

        Args:
            read, write: [r, width], or [width] for r = 1: lists, 2-D arrays or tensors, or base64
                with its `shape`.
            bias: [r], what Vector.parse takes, or one number for all.
            scale: a number.
            layer, site, positions, phase, exclude: as for Steer.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("read"):
            self._set(read=read_rows(read))
        with at("write"):
            self._set(write=_alike(write, "read", self.read))
        with at("bias"):
            self._set(bias=_read_bias(bias, len(self.read)))
        with at("scale"):
            self._set(scale=read_scalar(scale))
        self._set_place(layer, site, positions, phase, exclude)

    def own(self) -> dict[str, Any]:
        return {"read": self.read, "write": self.write, "bias": self.bias, "scale": self.scale}

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        reads = rows_by_value("read", self.read, width)
        writes = rows_by_value("write", self.write, width)
        return _rank_one_each(reads, writes, self.bias, float32(self.scale))


@dataclass(frozen=True, slots=True, init=False)
class LoReFT(Operation):
    """Replace h within a learned subspace: h ← h + Rᵀ (W h + b − R h).

    Wu et al. 2024 (representation finetuning, arXiv:2404.03592). In `pyreft` R is the transpose
    of `rotate_layer.weight`, W and b are `learned_source`'s.

    Attributes:
        rotation: R, r rows, each as wide as the model; orthonormal to within 1e-3.
        weight: W, as many rows.
        bias: b, [r].
    """

    op = "loreft"

    rotation: tuple[Vector, ...]
    weight: tuple[Vector, ...]
    bias: Vector

    def __init__(
        self,
        rotation: object,
        weight: object,
        bias: object,
        layer: object,
        site: object = SITE,
        positions: object = "all",
        phase: object = None,
        exclude: object = None,
    ) -> None:
        """Reads each field in any of its forms.

        Args:
            rotation, weight: [r, width], or [width] for r = 1: lists, 2-D arrays or tensors, or
                base64 with its `shape`.
            bias: [r], what Vector.parse takes, or one number for all.
            layer, site, positions, phase, exclude: as for Steer.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name. The rows of
                `rotation` are not orthonormal.
        """
        with at("rotation"):
            self._set(rotation=read_rows(rotation))
            error = gram_error(self.rotation)
            if error > ORTHONORMAL_TO:
                raise SpecError(
                    "",
                    f"expected orthonormal rows, but their products differ from that by "
                    f"{error:.3g}, more than {ORTHONORMAL_TO:g}",
                )
        with at("weight"):
            self._set(weight=_alike(weight, "rotation", self.rotation))
        with at("bias"):
            self._set(bias=_read_bias(bias, len(self.rotation)))
        self._set_place(layer, site, positions, phase, exclude)

    def own(self) -> dict[str, Any]:
        return {"rotation": self.rotation, "weight": self.weight, "bias": self.bias}

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        rotation = rows_by_value("rotation", self.rotation, width)
        with at("weight"):
            rows = wide(rows_by_value("", self.weight, width)) - wide(rotation)
            reads = read_rows(rows)
        return _rank_one_each(reads, rotation, self.bias, 1.0)


def _rank_one_each(
    reads: tuple[Vector, ...], writes: tuple[Vector, ...], bias: Vector, scale: float
) -> tuple[Instruction, ...]:
    return one_edit(
        [
            Instruction(Op.LINEAR, read=read, write=(write,), a=scale, b=b)
            for read, write, b in zip(reads, writes, bias.numpy().tolist(), strict=True)
        ]
    )


def _alike(value: object, other: str, rows: tuple[Vector, ...]) -> tuple[Vector, ...]:
    """Rows of the same shape as those of another field."""
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
        raise SpecError("", f"expected {rank} numbers, one for each row, got {found.size}")
    return found
