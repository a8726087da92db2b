"""Readers of matrices: several vectors of one width, from Python values and JSON."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from midstream.errors import SpecError
from midstream.spec.named_vector import Named, is_named, read_direction, read_row
from midstream.spec.vector import Vector, read_base64
from midstream.validation import at, kind, read_fields, read_int

# Bounds the orthonormalisation work and the number of instructions of one edit.
MAX_RANK = 256

_SHAPED = ("f32", "shape")


def read_rows(value: object, most: int = MAX_RANK) -> tuple[Vector, ...]:
    """Read the rows of a matrix [r, width]; one vector [width] is a matrix of one row.

    Args:
        value: any form of one vector; a list or tuple of these; a 2-D numpy array or torch
            tensor; or `{"f32": "<base64>", "shape": [r, width]}`.
        most: the maximum of r; r is at least 1.

    Raises:
        SpecError: another form, rows of different widths, or a number that is not finite. The
            path has the row's index.
    """
    found = _read(value, most, Vector.parse)
    return tuple(row for row in found if isinstance(row, Vector))


def read_directions(value: object, most: int = MAX_RANK) -> tuple[Vector | Named, ...]:
    """Read rows like `read_rows`; any row may also be the name of a registered vector."""
    return _read(value, most, read_direction)


def read_rows_or_names(value: object, most: int = MAX_RANK) -> tuple[Vector | Named, ...]:
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
        return _from_base64(value, most)
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
    return value.detach().to("cpu") if hasattr(value, "detach") else value


def _from_list(
    rows: Any, most: int, read: Callable[[object], Vector | Named]
) -> tuple[Vector | Named, ...]:
    _check_count(len(rows), most)
    found: list[Vector | Named] = []
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
            found.append(row)
    return tuple(found)


def _from_base64(value: Mapping[Any, Any], most: int) -> tuple[Vector, ...]:
    given = read_fields(value, required=_SHAPED)
    count, width = _read_shape(given["shape"])
    with at("shape"):
        _check_count(count, most)
    with at("f32"):
        data = read_base64(given["f32"])
        if len(data) != 4 * count * width:
            raise SpecError(
                "",
                f"expected {4 * count * width} bytes, {count} rows of {width} float32, got "
                f"{len(data)}",
            )
    found = []
    for index in range(count):
        with at(f"[{index}]"):
            found.append(Vector(data[4 * width * index : 4 * width * (index + 1)]))
    return tuple(found)


def _read_shape(value: object) -> tuple[int, int]:
    with at("shape"):
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            shown = f"{len(value)} parts" if isinstance(value, (list, tuple)) else kind(value)
            raise SpecError("", f"expected [rows, width], got {shown}")
        sizes = []
        for index, part in enumerate(value):
            with at(f"[{index}]"):
                size = read_int(part)
                if size < 1:
                    raise SpecError("", f"expected at least 1, got {size}")
                sizes.append(size)
    return sizes[0], sizes[1]


def _check_count(count: int, most: int) -> None:
    if count == 0:
        raise SpecError("", "expected at least one row, got none")
    if count > most:
        raise SpecError("", f"expected at most {most} rows, got {count}")
