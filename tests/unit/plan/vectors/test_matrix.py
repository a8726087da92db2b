import base64
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused
from unit.plan.strategies import floats32

from midstream.errors import SpecError
from midstream.plan.vectors.matrix import (
    MAX_WIDTH,
    Matrix,
    emit_rows,
    matrix_of,
    read_directions,
    read_matrix,
    read_rows,
)
from midstream.plan.vectors.named_vector import Named
from midstream.plan.vectors.vector import Vector

NUMBERS = [[1.5, -2.0, 0.25], [0.0, 8.0, 1.0]]
ROWS = tuple(Vector.parse(row) for row in NUMBERS)
TEXT = base64.b64encode(struct.pack("<6f", *NUMBERS[0], *NUMBERS[1])).decode()

matrices = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(floats32, min_size=width, max_size=width), min_size=1, max_size=4
    )
)


def test_every_form_gives_the_same_rows():
    for value in (
        NUMBERS,
        tuple(map(tuple, NUMBERS)),
        ROWS,
        [ROWS[0], {"f32": TEXT[16:]}],
        [np.array(NUMBERS[0]), torch.tensor(NUMBERS[1])],
        np.array(NUMBERS),
        np.array(NUMBERS, np.float16),
        np.array(NUMBERS).T.copy().T,
        torch.tensor(NUMBERS),
        torch.tensor(NUMBERS, dtype=torch.bfloat16, requires_grad=True),
        {"f32": TEXT, "shape": [2, 3]},
    ):
        assert read_rows(value) == ROWS, value
        assert read_directions(value) == ROWS


@pytest.mark.parametrize(
    "value", [NUMBERS[0], np.array(NUMBERS[0]), torch.tensor(NUMBERS[0]), ROWS[0], ROWS[0].emit()]
)
def test_one_vector_is_a_matrix_of_one_row(value):
    assert read_rows(value) == (ROWS[0],)


@given(matrices)
def test_what_is_emitted_is_read_back(numbers):
    rows = read_rows(numbers)
    assert read_rows(emit_rows(rows)) == rows
    assert read_directions(emit_rows(rows)) == rows


def test_rows_by_name_are_emitted_as_names():
    rows = (Named("a"), ROWS[0])
    assert emit_rows(rows) == [{"name": "a", "scale": 1.0}, ROWS[0].emit()]
    for form in (emit_rows(rows), ["a", NUMBERS[0]], [{"name": "a"}, ROWS[0]]):
        assert read_directions(form) == rows
    assert read_directions("a") == read_directions(["a"]) == (Named("a"),)


def test_what_is_no_matrix_is_refused():
    refused(
        read_rows,
        ([], "", "at least one row, got none"),
        (np.zeros((3, 0)), "[0]", "empty"),
        ([[1], [2, 3]], "[1]", "expected 1 numbers, as in earlier rows, got 2"),
        ([1.0, [2.0]], "[1]", "one dimension"),
        ([[1, float("nan")]], "[0][1]", "finite number, got nan"),
        (torch.tensor([[1.0], [float("inf")]]), "[1][0]", "finite number, got inf"),
        (["a"], "[0]", "got `str`"),
        ("a", "", "got `str`"),
        (None, "", "got `None`"),
        ([[0.0]] * 257, "", "expected at most 256 rows, got 257"),
        ({"f32": TEXT, "shape": [3, 3]}, "f32", "expected 36 bytes, 3 rows of 3 float32, got 24"),
        ({"f32": TEXT, "shape": [2, 0]}, "shape[1]", "at least 1, got 0"),
        ({"f32": TEXT, "shape": [2.0, 3]}, "shape[0]", "expected `int`"),
        ({"f32": TEXT, "shape": 6}, "shape", r"expected \[rows, width\], got `int`"),
        ({"f32": TEXT, "shape": [257, 3]}, "shape", "at most 256 rows"),
        ({"f32": TEXT, "shape": [2, 3], "x": 1}, "", "unknown field 'x'"),
    )


SQUARE = [[1.5, -2.0], [0.25, 8.0]]
WORDS = base64.b64encode(struct.pack("<4f", *SQUARE[0], *SQUARE[1])).decode()


def test_every_form_gives_the_same_matrix():
    for value in (
        SQUARE,
        tuple(map(tuple, SQUARE)),
        [Vector.parse(row) for row in SQUARE],
        np.array(SQUARE),
        np.array(SQUARE, np.float16).T.copy().T,
        torch.tensor(SQUARE),
        torch.tensor(SQUARE, dtype=torch.bfloat16, requires_grad=True),
        torch.tensor(SQUARE, dtype=torch.float64).T.contiguous().T,
        {"f32": WORDS, "shape": [2, 2]},
    ):
        found = read_matrix(value)
        assert isinstance(found, Matrix), value
        assert found.numpy().reshape(2, 2).tolist() == SQUARE
        assert found == matrix_of(SQUARE) == read_matrix(found)
        assert (found.width, found.emit()) == (2, {"f32": WORDS, "shape": [2, 2]})


def test_a_matrix_of_one_number_and_a_name_are_read():
    assert matrix_of([[3.0]]).width == 1
    assert read_matrix("act") == read_matrix({"name": "act"}) == Named("act")


def test_a_matrix_is_no_vector_of_the_same_numbers():
    assert matrix_of(SQUARE) != Vector(matrix_of(SQUARE).data)
    assert "Matrix(width=2" in repr(matrix_of(SQUARE))
    with pytest.raises(SpecError, match="got `Matrix`"):
        Vector.parse(matrix_of(SQUARE))


def test_what_is_no_square_matrix_is_refused_with_what_would_be_right():
    refused(
        read_matrix,
        (NUMBERS, "", r"square matrix \[width, width\], got shape \[2, 3\]"),
        (np.zeros(4), "", r"got shape \[4\]"),
        (torch.zeros(0, 0), "", r"got shape \[0, 0\]"),
        (torch.zeros(2, 2, dtype=torch.complex64), "", "real numbers, got a tensor of"),
        (np.zeros((2, 2), bool), "", "real numbers, got an array of bool"),
        (np.array([[1, 2], [3, np.inf]]), "[1][1]", "finite number, got inf"),
        (np.array([[1, 1e39], [3, 4]]), "[0][1]", r"1e\+39 overflows float32"),
        (torch.zeros(2, 2, device="meta"), "", "the tensor's values cannot be read"),
        (np.ma.masked_array(np.eye(2), mask=[[0, 1], [0, 0]]), "", "numbers are masked"),
        ([[1, 2], [3]], "[1]", "expected 2 numbers, as in earlier rows, got 1"),
        ([1.0, 2.0], "", "a square matrix: .*got `list`"),
        (Vector.parse([1.0] * 4), "", "a square matrix: .*got a vector of 4 numbers"),
        ({"f32": WORDS}, "", "missing field `shape`"),
        ({"f32": WORDS, "shape": [3, 3]}, "f32", "expected 36 bytes, 3 rows of 3 float32, got 16"),
        ({"f32": "", "shape": [MAX_WIDTH + 1] * 2}, "shape", "at most 16384, got 16385"),
        ({"name": "act", "scale": 2}, "scale", "expected 1"),
    )


def test_tensors_of_other_storage_are_read_as_what_they_are_or_refused():
    negative = torch._neg_view(torch.tensor(SQUARE, dtype=torch.float32))
    assert matrix_of(negative) == matrix_of(-torch.tensor(SQUARE, dtype=torch.float32))
    meta = torch.zeros(2, 3, device="meta")
    refused(read_rows, (meta, "the tensor's values cannot be read"))
