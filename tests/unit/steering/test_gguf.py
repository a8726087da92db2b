"""GGUF reading, against GGML's block formats written out value by value."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from unit.demo.model.gguf_file import ALIGN, gguf_bytes, text

from midstream.errors import ModelError
from midstream.steering.gguf import LAYOUTS, Tensor, read_gguf


def f16(block: bytes, at: int) -> float:
    return float(np.frombuffer(block[at : at + 2], "<f2")[0])


def i8(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def ref_f32(block: bytes) -> list[float]:
    return list(struct.unpack("<f", block))


def ref_f16(block: bytes) -> list[float]:
    return list(struct.unpack("<e", block))


def ref_q4_1(block: bytes) -> list[float]:
    """ggml: { half d, m; uint8 qs[16]; }"""
    d, m, out = f16(block, 0), f16(block, 2), [0.0] * 32
    for j in range(16):
        out[j] = (block[4 + j] & 0x0F) * d + m
        out[j + 16] = (block[4 + j] >> 4) * d + m
    return out


def ref_q5_0(block: bytes) -> list[float]:
    """ggml: { half d; uint8 qh[4]; uint8 qs[16]; }"""
    d, out = f16(block, 0), [0.0] * 32
    (qh,) = struct.unpack("<I", block[2:6])
    for j in range(16):
        low = (block[6 + j] & 0x0F) | ((qh >> j) & 1) << 4
        high = (block[6 + j] >> 4) | ((qh >> (j + 16)) & 1) << 4
        out[j], out[j + 16] = (low - 16) * d, (high - 16) * d
    return out


def ref_q8_0(block: bytes) -> list[float]:
    """ggml: { half d; int8 qs[32]; }"""
    return [i8(q) * f16(block, 0) for q in block[2:]]


def ref_q4_k(block: bytes) -> list[float]:
    """ggml: { half d, dmin; uint8 scales[12]; uint8 qs[128]; }, as dequantize_row_q4_K does."""
    d, dmin, scales, qs = f16(block, 0), f16(block, 2), block[4:16], block[16:]

    def scale_min(j: int) -> tuple[int, int]:
        if j < 4:
            return scales[j] & 63, scales[j + 4] & 63
        low = (scales[j + 4] & 0x0F) | (scales[j - 4] >> 6) << 4
        high = (scales[j + 4] >> 4) | (scales[j] >> 6) << 4
        return low, high

    out = []
    for chunk in range(4):
        part = qs[32 * chunk : 32 * chunk + 32]
        for half, shift in ((2 * chunk, 0), (2 * chunk + 1, 4)):
            scale, floor = scale_min(half)
            out += [d * scale * ((q >> shift) & 0x0F) - dmin * floor for q in part]
    return out


def ref_q6_k(block: bytes) -> list[float]:
    """ggml: { uint8 ql[128], qh[64]; int8 scales[16]; half d; }, as dequantize_row_q6_K does."""
    out, d = [0.0] * 256, f16(block, 208)
    for n in (0, 1):
        ql, qh, sc = block[64 * n :], block[128 + 32 * n :], block[192 + 8 * n :]
        for i in range(32):
            quants = (
                (ql[i] & 0x0F) | (qh[i] & 3) << 4,
                (ql[i + 32] & 0x0F) | ((qh[i] >> 2) & 3) << 4,
                (ql[i] >> 4) | ((qh[i] >> 4) & 3) << 4,
                (ql[i + 32] >> 4) | ((qh[i] >> 6) & 3) << 4,
            )
            for k, quant in enumerate(quants):
                out[128 * n + 32 * k + i] = d * i8(sc[i // 16 + 2 * k]) * (quant - 32)
    return out


REFERENCES = {
    0: ref_f32,
    1: ref_f16,
    3: ref_q4_1,
    6: ref_q5_0,
    8: ref_q8_0,
    12: ref_q4_k,
    14: ref_q6_k,
}
HALVES = {0: (), 1: (0,), 3: (0, 2), 6: (0,), 8: (0,), 12: (0, 2), 14: (208,)}


def random_blocks(kind: int, seed: int, count: int) -> np.ndarray:
    """uint8 `[count, block bytes]`: random bits, but for its float fields, which are finite."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, LAYOUTS[kind].size_bytes), np.uint8)
    for at in HALVES[kind]:
        halves = rng.normal(0, 4, count).astype("<f2")
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    if kind == 0:
        return rng.normal(0, 4, count).astype("<f4").view(np.uint8).reshape(count, 4)
    return blocks


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
    raw = random_blocks(8, 0, 4).tobytes()
    floats = np.arange(6, dtype="<f4").tobytes()
    return gguf_bytes(metadata, [(b"w", (2, 64), 8, raw), (b"b", (2, 3), 0, floats)])


@pytest.mark.parametrize("kind", sorted(LAYOUTS), ids=lambda kind: LAYOUTS[kind].name)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5))
@settings(max_examples=25)
def test_every_block_format_unpacks_as_ggml_does(kind: int, seed: int, count: int) -> None:
    blocks = random_blocks(kind, seed, count)
    got = Tensor(kind, (count, LAYOUTS[kind].num_values), blocks.reshape(-1)).dequantize()
    expected = [REFERENCES[kind](block.tobytes()) for block in blocks]
    assert got.dtype == np.float32
    assert got.flags.writeable
    assert got.flags.c_contiguous
    np.testing.assert_allclose(got, np.array(expected), rtol=1e-6, atol=1e-4)


def test_a_file_reads_back_with_shapes_slowest_dimension_first() -> None:
    gguf = read_gguf(small_file())
    assert gguf.metadata == {
        "name": "tiny",
        "tokens": ["a", "é"],
        "numbers": [-1, 2, 300],
        "size": 7,
        "flag": True,
    }
    assert gguf.tensors["w"].shape == (2, 64)
    np.testing.assert_array_equal(gguf.tensors["b"].dequantize(), [[0, 1, 2], [3, 4, 5]])


def test_every_truncation_is_a_model_error() -> None:
    whole = small_file()
    end_of_last_tensor = len(whole) - (-24 % ALIGN)
    for end in range(end_of_last_tensor):
        with pytest.raises(ModelError):
            read_gguf(whole[:end])


@given(
    flips=st.lists(st.tuples(st.integers(0, 220), st.integers(0, 255)), min_size=1, max_size=4),
)
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


HOSTILE = {
    "magic": (b"GGML" + bytes(64), "start with"),
    "empty": (b"", "truncated"),
    "version": (gguf_bytes([], [], version=9), "expected version"),
    "huge string": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63),
        "truncated",
    ),
    "huge array": (
        gguf_bytes([(b"k", 9, struct.pack("<IQ", 4, 2**62))], []),
        "truncated",
    ),
    "huge array of strings": (
        gguf_bytes([(b"k", 9, struct.pack("<IQ", 8, 2**62))], []),
        "truncated",
    ),
    "unknown kind": (gguf_bytes([(b"k", 77, b"")], []), "kind 77"),
    "deep nesting": (
        gguf_bytes([(b"k", 9, struct.pack("<IQ", 9, 1) * 2000)], []),
        "kind 9",
    ),
    "not utf-8": (gguf_bytes([(b"\xff", 7, b"\0")], []), "UTF-8"),
    "alignment 0": (
        gguf_bytes([(b"general.alignment", 4, struct.pack("<I", 0))], []),
        "alignment",
    ),
    "unknown type": (gguf_bytes([], [(b"w", (2, 2), 99, bytes(16))]), "GGML type 99"),
    "odd shape": (gguf_bytes([], [(b"w", (3,), 8, bytes(34))]), "blocks of 32"),
    "blocks across rows": (gguf_bytes([], [(b"w", (2, 16), 8, bytes(34))]), "blocks of 32"),
    "too many dimensions": (gguf_bytes([], [(b"w", (1,) * 9, 0, bytes(4))]), "dimensions"),
    "empty shape": (gguf_bytes([], [(b"w", (0, 4), 0, b"")]), "is not a multiple"),
    "quantised scalar": (gguf_bytes([], [(b"w", (), 8, bytes(34))]), "blocks of 32"),
    "beyond the end": (gguf_bytes([], [(b"w", (2**40, 64), 0, bytes(64))]), "truncated"),
    "twice": (
        gguf_bytes([], [(b"w", (1,), 0, bytes(4)), (b"w", (1,), 0, bytes(4))]),
        "twice",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_with_the_reason(name: str) -> None:
    data, reason = HOSTILE[name]
    with pytest.raises(ModelError, match=reason):
        read_gguf(data)


def test_missing_metadata_is_named() -> None:
    with pytest.raises(ModelError, match=r"'llama\.block_count'"):
        read_gguf(small_file())["llama.block_count"]
