"""Edits and probes of single attention heads, as instructions on the vectors of all heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.plan.instructions import Instruction
from midstream.plan.shape import VectorSize
from midstream.plan.vectors.vector import Vector
from midstream.validation import MAX_ITEMS, as_list, at, is_int, kind, read_int

# Operations that read or write h by itself, not only by their vectors.
_OF_H = (Op.ADD_MATCHED, Op.REPLACE, Op.SCALE, Op.MULTIPLY)


def read_indices(value: object, field: str) -> tuple[int, ...]:
    """Read an index from 0 on, or a list of them, each once; return them ascending."""
    return tuple(sorted(read_ordered_indices(value, field)))


def read_ordered_indices(value: object, field: str) -> tuple[int, ...]:
    """Read an index from 0 on, or a list of them, each once; return them in the given order."""
    with at(field):
        values = as_list(value)
        items = [values] if is_int(values) else values
        if not isinstance(items, (list, tuple, range)):
            raise SpecError("", f"expected an `int` or a list of these, got {kind(value)}")
        if not 1 <= len(items) <= MAX_ITEMS:
            raise SpecError("", f"expected 1 to {MAX_ITEMS} items, got {len(items)}")
        indices = []
        for place, item in enumerate(items):
            with at(f"[{place}]" if len(items) > 1 else ""):
                index = read_int(item)
                if index < 0:
                    raise SpecError("", f"expected an index from 0 on, got {index}")
                indices.append(index)
        if len(set(indices)) < len(indices):
            raise SpecError("", "an index is given twice")
        return tuple(indices)


def head_size(
    heads: tuple[int, ...], size: VectorSize, field: str = "head", where: str = "this site"
) -> VectorSize:
    """Return the number of components of a head; `field` and `where` are for messages."""
    if not size.heads:
        raise SpecError(
            field, f"the vectors of {where} are not of heads; use the sites q, k, v or z"
        )
    if max(heads) >= size.heads:
        raise SpecError(
            field,
            f"head {max(heads)} is out of range: there are {size.heads} heads in the vectors of "
            f"{where}",
        )
    return VectorSize(size // size.heads, "the size of a head")


def in_heads(
    steps: tuple[Instruction, ...], heads: tuple[int, ...], size: VectorSize
) -> tuple[Instruction, ...]:
    """Return, for vectors of all heads, one edit that does `steps` in each of some heads."""
    if all(step.read is None and not step.write and step.mask is None for step in steps):
        mask = mask_of(_columns(heads, size), size)
        return tuple(replace(step, mask=mask) for step in steps)
    *before, last = [_in_head(step, head, size) for head in heads for step in steps]
    return *(replace(step, flags=step.flags & ~Flags.COUNTED) for step in before), last


def _in_head(step: Instruction, head: int, size: VectorSize) -> Instruction:
    if step.mask is not None:
        mask: Vector | None = padded(step.mask, head, size)
    else:
        needs_mask = step.op in _OF_H or Flags.KEEP in step.flags
        mask = mask_of(_columns((head,), size), size) if needs_mask else None
    return replace(
        step,
        read=None if step.read is None else padded(step.read, head, size),
        write=tuple(padded(vector, head, size) for vector in step.write),
        mask=mask,
    )


def padded(vector: Vector, head: int, size: int) -> Vector:
    """Return a vector of all heads that is zero outside of one."""
    import numpy as np

    values = np.zeros(size, np.float32)
    values[head * vector.size : (head + 1) * vector.size] = vector.numpy()
    return Vector.parse(values)


def _columns(heads: tuple[int, ...], size: VectorSize) -> tuple[int, ...]:
    width = size // size.heads
    return tuple(column for head in heads for column in range(head * width, (head + 1) * width))


def with_dims(step: Instruction, dims: tuple[int, ...], size: int) -> Instruction:
    """Return an instruction that reads and changes only some components; () means all."""
    if not dims:
        return step
    if dims[-1] >= size:
        raise SpecError("dims", f"{dims[-1]} is out of range: the vectors have {size} numbers")
    return replace(step, mask=mask_of(dims, size))


@lru_cache(maxsize=1024)
def mask_of(columns: tuple[int, ...], size: int) -> Vector:
    """Return the vector with ones at some components and zeros at the others."""
    return vector_of(dict.fromkeys(columns, 1.0), size)


def vector_of(components: Mapping[int, float], size: int) -> Vector:
    """Return the vector with some components, zero elsewhere."""
    import numpy as np

    values = np.zeros(size, np.float32)
    values[list(components)] = list(components.values())
    return Vector.parse(values)
