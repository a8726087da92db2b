import base64
import copy
import pickle
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused

from midstream.errors import SpecError
from midstream.plan import Vector
from midstream.validation import read_float32

NUMBERS = [1.5, -2.0, 0.25]
DATA = struct.pack("<3f", *NUMBERS)


def test_every_form_gives_the_same_vector():
    for value in (
        NUMBERS,
        tuple(NUMBERS),
        [np.float32(1.5), -2, np.float16(0.25)],
        np.array(NUMBERS),
        np.array(NUMBERS, np.float16),
        np.array(NUMBERS, ">f4"),
        np.repeat(np.array(NUMBERS, np.float32), 2)[::2],
        torch.tensor(NUMBERS),
        torch.tensor(NUMBERS, dtype=torch.bfloat16),
        torch.tensor(NUMBERS, dtype=torch.float64, requires_grad=True),
        torch.nn.Parameter(torch.tensor(NUMBERS, dtype=torch.float16)),
        {"f32": base64.b64encode(DATA).decode()},
        Vector(DATA),
    ):
        vector = Vector.parse(value)
        assert vector == Vector(DATA), value
        assert hash(vector) == hash(Vector(DATA))
        assert vector.data == DATA


class Series:
    """What pandas's Series has of an array."""

    shape = (2,)

    def __array__(self, dtype=None, copy=None):
        return np.array([1.0, 2.0])


def test_integers_a_series_and_one_row_are_vectors():
    expected = Vector.parse([1.0, 2.0])
    several = (np.array([1, 2]), np.array([1, 2], np.uint8), torch.tensor([1, 2]))
    for value in ([1, 2], *several, Series(), np.array([[1, 2]]), torch.tensor([[1.0, 2.0]])):
        assert Vector.parse(value) == expected, value


def test_a_vector_tells_its_size_norm_and_digest():
    vector = Vector.parse([3.0, 4.0])
    assert (vector.size, len(vector), vector.norm) == (2, 2, 5.0)
    # Golden: the digest keys caches and banks, in other processes too.
    assert vector.digest == "986c627ee6ef1bcc3d746256a7045624ceeb44c4ed557ca055b2d43933de3489"
    assert repr(vector) == f"Vector(size=2, norm=5, digest='{vector.digest[:8]}')"


def test_a_vector_cannot_be_changed_nor_by_its_source():
    source = np.array(NUMBERS, np.float32)
    vector = Vector.parse(source)
    source[:] = 0
    with pytest.raises(AttributeError):
        vector.data = b""
    with pytest.raises(ValueError, match="read-only"):
        vector.numpy()[0] = 1
    assert vector.data == DATA
    refused(Vector, ([1.0], "expected `bytes`, got `list`; see Vector.parse"))


def test_a_vector_survives_copying_and_pickling():
    vector = Vector.parse(NUMBERS)
    assert copy.deepcopy(vector) == pickle.loads(pickle.dumps(vector)) == vector
    assert pickle.loads(pickle.dumps(vector)).digest == vector.digest


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_what_is_emitted_is_read_back(numbers):
    vector = Vector.parse(numbers)
    assert Vector.parse(vector.emit()) == vector
    assert vector.numpy().tolist() == numbers


def test_values_are_rounded_to_float32():
    assert Vector.parse([0.1]).numpy()[0] == np.float32(0.1)
    assert Vector.parse([1e-60]).numpy()[0] == 0
    # Just above the largest float32: it would round to it, but does not fit.
    assert Vector.parse([3.4028234663852886e38]).norm == 3.4028234663852886e38


def test_what_is_no_vector_is_refused():
    refused(
        Vector.parse,
        ([], "", "empty"),
        (np.zeros(0), "", "empty"),
        ({"f32": ""}, "f32", "empty"),
        (np.zeros((2, 3)), "", r"one dimension, got shape \[2, 3\]"),
        (np.float32(1), "", r"got shape \[\]"),
        ([[1.0, 2.0]], "[0]", "expected a number, got `list`: a vector has one dimension"),
        ([1.0, float("nan")], "[1]", "finite number, got nan"),
        (np.array([1, np.inf, np.nan]), "[1]", "finite number, got inf"),
        (torch.tensor([1, 2, float("nan")]), "[2]", "finite number, got nan"),
        ({"f32": base64.b64encode(struct.pack("<2f", 0, float("nan"))).decode()}, "f32[1]", "nan"),
        ([0, 1e39], "[1]", r"1e\+39 overflows float32"),
        (torch.tensor([0, 1e39], dtype=torch.float64), "[1]", r"1e\+39 overflows float32"),
        ([0, 10**400], "[1]", "overflows float32"),
        ([0, True], "[1]", "expected a number, got `bool`"),
        ([0, None], "[1]", "expected a number, got `None`"),
        (np.array([True]), "", "real numbers, got an array of bool"),
        (np.array(["1"]), "", "real numbers, got an array of <U1"),
        (np.array([1.0, None]), "", "real numbers, got an array of object"),
        (torch.tensor([1j]), "", "real numbers, got a tensor of torch.complex64"),
        (torch.zeros(3, device="meta"), "", "the tensor's values cannot be read"),
        (np.ma.masked_array([1.0, 2.0], mask=[0, 1]), "", "numbers are masked"),
        ({"f32": "AAAA"}, "f32", "3 bytes are not a whole number"),
        ({"f32": "AA*A"}, "f32", "expected base64"),
        ({"f32": [1.0]}, "f32", "expected base64 as `str`, got `list`"),
        ({"f64": "AAAA"}, "", "unknown field 'f64'; known: `f32`"),
        ({}, "", "missing field `f32`"),
        ("happy", "", "expected a list of numbers.*got `str`"),
        (None, "", "expected a list of numbers.*got `None`"),
        ([0.0] * (2**20 + 1), "", "at most 1048576 numbers, got 1048577"),
    )


@given(
    st.lists(
        st.one_of(
            st.floats(), st.integers(), st.booleans(), st.floats(width=32), st.just("x"), st.none()
        ),
        min_size=1,
        max_size=8,
    )
)
def test_a_list_reads_as_its_numbers_one_by_one(values):
    """The fast way for usual lists gives what reading each number gives."""
    try:
        expected = [read_float32(each) for each in values]
    except SpecError:
        with pytest.raises(SpecError):
            Vector.parse(values)
    else:
        found = Vector.parse(values).numpy()
        assert found.tobytes() == np.asarray(expected, "<f4").tobytes()
