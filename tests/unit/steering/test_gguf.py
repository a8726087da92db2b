"""GGUF files: what is read back, and errors for damaged and hostile ones."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_file import ALIGN, gguf_bytes, text
from support.nightly import rounds
from support.refusals import refused

from midstream.errors import ModelError
from midstream.steering.gguf import read_gguf


def small_file() -> bytes:
    array = struct.pack("<IQ", 8, 2) + text(b"a") + text("é".encode())
    numbers = struct.pack("<IQ3h", 3, 3, -1, 2, 300)
    metadata = [
        (b"name", 8, text(b"tiny")),
        (b"tokens", 9, array),
        (b"numbers", 9, numbers),
        (b"size", 10, struct.pack("<Q", 7)),
        (b"flag", 7, b"\x01"),
    ]
    halves = np.random.default_rng(0).normal(0, 4, 128).astype("<f2").tobytes()
    floats = np.arange(6, dtype="<f4").tobytes()
    return gguf_bytes(metadata, [(b"w", (2, 64), 1, halves), (b"b", (2, 3), 0, floats)])


def test_floats_read_back_as_writable_float32() -> None:
    for kind, dtype in ((0, "<f4"), (1, "<f2")):
        values = np.random.default_rng(kind).normal(0, 4, (2, 3)).astype(dtype)
        gguf = read_gguf(gguf_bytes([], [(b"w", (2, 3), kind, values.tobytes())]))
        got = gguf.tensors["w"].dequantize()
        assert (got.dtype, got.flags.writeable, got.flags.c_contiguous) == (np.float32, True, True)
        np.testing.assert_array_equal(got, values.astype(np.float32))


def test_an_architecture_is_compared_before_the_tensors_are_read() -> None:
    metadata = [(b"general.architecture", 8, text(b"llama"))]
    quantised = gguf_bytes(metadata, [(b"w", (32,), 8, bytes(34))])
    refused(
        lambda data: read_gguf(data, architecture="controlvector"),
        (quantised, "architecture = 'controlvector', got 'llama'"),
        (gguf_bytes([], []), "architecture = 'controlvector', got none"),
        error=ModelError,
    )
    words = r"'w' has GGML type 8; expected one of 0 \(F32\), 1 \(F16\)"
    with pytest.raises(ModelError, match=words):
        read_gguf(quantised, architecture="llama")


def test_a_file_reads_back_with_shapes_slowest_dimension_first() -> None:
    gguf = read_gguf(small_file())
    numbers = {"numbers": [-1, 2, 300], "size": 7, "flag": True}
    assert gguf.metadata == {"name": "tiny", "tokens": ["a", "é"], **numbers}
    with pytest.raises(ModelError, match=r"'llama\.block_count'"):
        gguf["llama.block_count"]
    assert gguf.tensors["w"].shape == (2, 64)
    np.testing.assert_array_equal(gguf.tensors["b"].dequantize(), [[0, 1, 2], [3, 4, 5]])


def test_every_truncation_is_a_model_error() -> None:
    whole = small_file()
    end_of_last_tensor = len(whole) - (-24 % ALIGN)
    for end in range(end_of_last_tensor):
        with pytest.raises(ModelError):
            read_gguf(whole[:end])


@given(flips=st.lists(st.tuples(st.integers(0, 220), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=rounds(suite=150, nightly=1200))
def test_damage_is_a_model_error_or_reads(flips: list[tuple[int, int]]) -> None:
    damaged = bytearray(small_file())
    for at, byte in flips:
        damaged[at] = byte
    try:
        gguf = read_gguf(bytes(damaged))
    except ModelError:
        return
    for tensor in gguf.tensors.values():
        with np.errstate(all="ignore"):
            tensor.dequantize()


def test_a_hostile_file_is_refused_with_the_reason() -> None:
    big = [(version, struct.pack(">IQQ", version, 0, 0) + bytes(64)) for version in (2, 3)]
    refused(
        read_gguf,
        (b"GGML" + bytes(64), "start with"),
        (b"", "truncated"),
        (gguf_bytes([], [], version=9), "expected version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "truncated"),
        (gguf_bytes([(b"k", 9, struct.pack("<IQ", 4, 2**62))], []), "truncated"),
        (gguf_bytes([(b"k", 77, b"")], []), "kind 77"),
        (gguf_bytes([(b"k", 9, struct.pack("<IQ", 9, 1) * 2000)], []), "kind 9"),
        (gguf_bytes([(b"\xff", 7, b"\0")], []), "UTF-8"),
        (gguf_bytes([(b"general.alignment", 4, struct.pack("<I", 0))], []), "alignment"),
        (gguf_bytes([], [(b"w", (2, 2), 99, bytes(16))]), "GGML type 99"),
        (gguf_bytes([], [(b"w", (1,) * 9, 0, bytes(4))]), "dimensions"),
        (gguf_bytes([], [(b"w", (0, 4), 0, b"")]), "is not a multiple"),
        (gguf_bytes([], [(b"w", (2**40, 64), 0, bytes(64))]), "truncated"),
        (gguf_bytes([], [(b"w", (1,), 0, bytes(4)), (b"w", (1,), 0, bytes(4))]), "twice"),
        *((b"GGUF" + data, f"version {one} in big-endian.*little-endian") for one, data in big),
        error=ModelError,
    )
