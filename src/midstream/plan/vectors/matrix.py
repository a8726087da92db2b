"""Readers of matrices: several vectors of one width, or `Matrix`, from Python values and JSON."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

from midstream.errors import SpecError
from midstream.plan.argument_names import read_each
from midstream.plan.shape import VectorSize
from midstream.plan.vectors.named_vector import Named, is_named, read_direction, read_row
from midstream.plan.vectors.vector import MAX_NUMBERS, Vector, check_unmasked, read_base64, rounded
from midstream.validation import at, kind, read_fields, read_int

# Bounds the orthonormalisation work and the number of instructions of one edit.
MAX_RANK = 256

# Of a `Matrix`.
MAX_WIDTH = math.isqrt(MAX_NUMBERS)

_SQUARE = (
    'a square matrix: a 2-D numpy array or torch tensor, a list of rows, or {"f32": "<base64 of '
    'little-endian float32>", "shape": [width, width]}'
)


class Matrix(Vector):
    """A square matrix of finite float32 numbers, its rows one after the other: [width · width]."""

    __slots__ = ()
    is_row = False

    @property
    def width(self) -> int:
        return math.isqrt(self.size)

    @property
    def flat(self) -> Vector:
        """The same numbers as a vector, which shares them; its content is not hashed again."""
        vector = object.__new__(Vector)
        object.__setattr__(vector, "data", self.data)
        object.__setattr__(vector, "digest", self.digest)
        return vector

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which `read_matrix` reads."""
        return {**Vector.emit(self), "shape": [self.width, self.width]}

    def __repr__(self) -> str:
        return f"Matrix(width={self.width}, norm={self.norm:.3g}, digest={self.digest[:8]!r})"


def read_matrix(value: object) -> Matrix | Named:
    """Read a square matrix by value (`matrix_of`), or the name of registered ones, of scale 1."""
    if is_named(value):
        named = read_row(value)
        assert isinstance(named, Named)
        return named
    return matrix_of(value)


def matrix_of(value: object) -> Matrix:
    """Read a matrix by value like `read_matrix`."""
    if isinstance(value, Matrix):
        return value
    if isinstance(value, Mapping):
        data, _ = _read_shaped(value, check_square)
        with at("f32"):
            return Matrix(data)
    return _from_square(value)


def matrix_by_value(matrix: Matrix | Named, width: int) -> Matrix:
    """Return a matrix after checking that it is bound and has this width."""
    if isinstance(matrix, Named):
        raise SpecError("", f"the matrix `{matrix.name}` is not registered")
    if matrix.width != width:
        size = width if isinstance(width, VectorSize) else VectorSize(width)
        raise SpecError(
            "",
            f"expected {size} numbers a row, and as many rows: {size.meaning}, got {matrix.width}",
        )
    return matrix


def read_vector_or_matrix(value: object) -> Vector:
    """Read a vector (any form of Vector.parse), or a matrix (`matrix_of`) of at least two rows."""
    shape = tuple(getattr(value, "shape", ()))
    is_several = is_matrix(value) and (len(shape) != 2 or shape[0] > 1)
    return matrix_of(value) if is_several else Vector.parse(value)


def _from_square(value: Any) -> Matrix:
    import numpy as np

    if hasattr(value, "detach"):
        check_square(tuple(value.shape))
        if value.is_complex() or str(value.dtype) == "torch.bool":
            raise SpecError("", f"expected real numbers, got a tensor of {value.dtype}")
        try:
            value = value.detach().to("cpu").resolve_neg()
            # numpy has no bfloat16.
            value = value.numpy() if str(value.dtype) == "torch.float64" else value.float().numpy()
        except (RuntimeError, TypeError) as error:  # NotImplementedError is a RuntimeError
            raise SpecError("", f"the tensor's values cannot be read: {error}") from None
    elif isinstance(value, (list, tuple)) and value and all(map(_is_row, value)):
        value = np.stack([row.numpy() for row in read_rows(value, MAX_WIDTH)])
    elif not hasattr(value, "__array__") or isinstance(value, Vector):
        got = f"a vector of {value.size} numbers" if isinstance(value, Vector) else kind(value)
        raise SpecError("", f"expected {_SQUARE}, got {got}")
    check_unmasked(value)
    array = np.asarray(value)
    check_square(array.shape)
    return Matrix(rounded(array))


def check_square(shape: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
        raise SpecError("", f"expected a square matrix [width, width], got shape {list(shape)}")
    if shape[0] > MAX_WIDTH:
        raise SpecError("", f"expected a width of at most {MAX_WIDTH}, got {shape[0]}")


def read_rows(value: object, most: int = MAX_RANK) -> tuple[Vector, ...]:
    """Read the rows of a matrix [r, width], 1 to `most`; one vector is a matrix of one row."""
    rows = _read(value, most, Vector.parse)
    return tuple(row for row in rows if isinstance(row, Vector))


def read_directions(value: object) -> tuple[Vector | Named, ...]:
    """Read rows like `read_rows`; any row may also be the name of a registered vector."""
    return _read(value, MAX_RANK, read_direction)


def read_rows_or_names(value: object, most: int) -> tuple[Vector | Named, ...]:
    """Read rows like `read_directions`; the rows' lengths matter."""
    return _read(value, most, read_row)


def emit_rows(rows: tuple[Vector | Named, ...]) -> object:
    """Return the JSON form, which `read_rows` or `read_directions` reads."""
    vectors = [row for row in rows if isinstance(row, Vector)]
    if len(vectors) < len(rows):
        return [row.emit() for row in rows]
    data = b"".join(vector.data for vector in vectors)
    return {
        "f32": base64.b64encode(data).decode("ascii"),
        "shape": [len(vectors), vectors[0].size],
    }


def _read(
    value: object, most: int, read: Callable[[object], Vector | Named]
) -> tuple[Vector | Named, ...]:
    if isinstance(value, Mapping) and "shape" in value:
        data, width = _read_shaped(value, lambda shape: _check_count(shape[0], most))
        rows = [data[start : start + 4 * width] for start in range(0, len(data), 4 * width)]
        return read_each("", rows, Vector)
    if is_matrix(value):
        return _from_list(_rows_of(value), most, read)
    return (read(value),)


def is_matrix(value: object) -> bool:
    """Return whether `value` is several rows rather than one vector."""
    if isinstance(value, Mapping):
        return "shape" in value
    if isinstance(value, (list, tuple)):
        return not value or _is_row(value[0])
    return len(getattr(value, "shape", ())) == 2


def _is_row(value: object) -> bool:
    return (
        isinstance(value, (Vector, list, tuple, Mapping))
        or is_named(value)
        or len(getattr(value, "shape", ())) == 1
    )


def _rows_of(value: Any) -> Any:
    # One copy from the device instead of one per row.
    if not hasattr(value, "detach"):
        return value
    try:
        return value.detach().to("cpu")
    except RuntimeError as error:
        raise SpecError("", f"the tensor's values cannot be read: {error}") from None


def _from_list(
    rows: Any, most: int, read: Callable[[object], Vector | Named]
) -> tuple[Vector | Named, ...]:
    _check_count(len(rows), most)
    vectors: list[Vector | Named] = []
    width = 0
    for index, value in enumerate(rows):
        with at(f"[{index}]"):
            row = read(value)
            if isinstance(row, Vector):
                width = width or row.size
                if row.size != width:
                    raise SpecError(
                        "", f"expected {width} numbers, as in earlier rows, got {row.size}"
                    )
            vectors.append(row)
    return tuple(vectors)


def _read_shaped(
    value: Mapping[Any, Any], check: Callable[[tuple[int, ...]], None]
) -> tuple[bytes, int]:
    """Return the bytes of a matrix in base64, and its width; `check` is given its shape."""
    fields = read_fields(value, required=("f32", "shape"))
    with at("shape"):
        sizes = fields["shape"]
        if not isinstance(sizes, (list, tuple)) or len(sizes) != 2:
            shown = f"{len(sizes)} parts" if isinstance(sizes, (list, tuple)) else kind(sizes)
            raise SpecError("", f"expected [rows, width], got {shown}")
        count, width = read_each("", sizes, _read_size)
        check((count, width))
    with at("f32"):
        data = read_base64(fields["f32"])
        if len(data) != 4 * count * width:
            raise SpecError(
                "",
                f"expected {4 * count * width} bytes, {count} rows of {width} float32, got "
                f"{len(data)}",
            )
    return data, width


def _read_size(value: object) -> int:
    size = read_int(value)
    if size < 1:
        raise SpecError("", f"expected at least 1, got {size}")
    return size


def _check_count(count: int, most: int) -> None:
    if count == 0:
        raise SpecError("", "expected at least one row, got none")
    if count > most:
        raise SpecError("", f"expected at most {most} rows, got {count}")
