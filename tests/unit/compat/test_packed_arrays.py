"""Compressed arrays are read with bounded memory; what is not true of them is rejected."""

import base64
import io
import sys
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.others_words import V, encoded
from support.refusals import refused

from midstream.compat.packed_arrays import DTYPES, MAX_NUMBERS, read_array
from midstream.errors import SpecError

ROW = np.array(V, np.float32)


class Reader:
    """What zstandard's stream reader does, with zlib."""

    def __init__(self, source):
        self.source = zlib.decompress(source.read())
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def read(self, size):
        LIBRARY.asked = size
        return self.source[:size]


class Decompressor:
    """What zstandard's decompressor does, with zlib."""

    def __init__(self, max_window_size):
        assert max_window_size <= 1 << 27

    def stream_reader(self, source):
        assert isinstance(source, io.BytesIO)
        return Reader(source)


LIBRARY = SimpleNamespace(ZstdDecompressor=Decompressor, ZstdError=zlib.error, asked=0)


@pytest.fixture
def zstandard(monkeypatch):
    """Zstandard in place of what is installed, or not."""
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "zstandard", LIBRARY)


def compressed(data):
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.usefixtures("zstandard")
def test_compressed_numbers_are_read():
    found = read_array(compressed(ROW.tobytes()), [1, 3], "float32", "zstd")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, ROW[None])


@pytest.mark.usefixtures("zstandard")
def test_no_more_is_decompressed_than_the_shape_says():
    def read(data):
        return read_array(data, [3], "float32", "zstd")

    for content in (bytes(1 << 20), ROW.tobytes()[:-1], b""):
        refused(read, (compressed(content), "data", "expected 12 bytes"))
        assert LIBRARY.asked == 13
    refused(read, (encoded(V), "data", "expected zstd data"))


def test_without_a_library_the_message_says_what_to_do(monkeypatch):
    for name in ("compression.zstd", "backports.zstd", "zstandard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SpecError, match='install zstandard there, or send "compression": null'):
        read_array(compressed(ROW.tobytes()), [3], "float32", "zstd")


def test_a_malformed_array_is_rejected_with_its_place():
    refused(
        lambda arguments: read_array(*arguments),
        ((encoded(V), None), "shape", ""),
        ((encoded(V), []), "shape", ""),
        ((encoded(V), [3, 0]), "shape[1]", ""),
        ((encoded(V), [True, 3]), "shape[0]", ""),
        ((encoded(V), [MAX_NUMBERS, 2]), "shape", ""),
        ((encoded(V), [1] * 4), "shape", ""),
        ((encoded(V), [4]), "data", ""),
        ((encoded(V), [3], "float16"), "data", ""),
        ((encoded(V), [3], "int32"), "dtype", ""),
        ((encoded(V), [3], ["float32"]), "dtype", ""),
        ((encoded(V), [3], "float32", "gzip"), "compression", ""),
        (("€", [3]), "data", ""),
        (("A", [3]), "data", ""),
        (([1.0], [3]), "data", ""),
    )


@given(st.sampled_from(DTYPES), st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=8))
def test_numbers_come_back_as_they_were(dtype, numbers):
    array = np.array(numbers, np.float32)
    if dtype == "bfloat16":
        words = array.view(np.uint32) >> 16
        array = (words << 16).astype(np.uint32).view(np.float32)
        data = words.astype("<u2").tobytes()
    else:
        data = array.astype(dtype).tobytes()
    found = read_array(data, [len(numbers)], dtype)
    np.testing.assert_array_equal(found, array)
