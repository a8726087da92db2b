"""Quantised tensors, against GGML's block formats written out value by value."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_file import gguf_bytes

from midstream.errors import ModelError
from midstream.lab.demo.model.quantised import LAYOUTS, QUANTISED
from midstream.steering.gguf import read_gguf


def f16(block, at):
    return float(np.frombuffer(block[at : at + 2], "<f2")[0])


def i8(byte):
    return byte - 256 if byte > 127 else byte


def ref_q4_1(block):
    """ggml: { half d, m; uint8 qs[16]; }"""
    d, m, out = f16(block, 0), f16(block, 2), [0.0] * 32
    for j in range(16):
        out[j] = (block[4 + j] & 0x0F) * d + m
        out[j + 16] = (block[4 + j] >> 4) * d + m
    return out


def ref_q5_0(block):
    """ggml: { half d; uint8 qh[4]; uint8 qs[16]; }"""
    d, out = f16(block, 0), [0.0] * 32
    (qh,) = struct.unpack("<I", block[2:6])
    for j in range(16):
        low = (block[6 + j] & 0x0F) | ((qh >> j) & 1) << 4
        high = (block[6 + j] >> 4) | ((qh >> (j + 16)) & 1) << 4
        out[j], out[j + 16] = (low - 16) * d, (high - 16) * d
    return out


def ref_q8_0(block):
    """ggml: { half d; int8 qs[32]; }"""
    return [i8(q) * f16(block, 0) for q in block[2:]]


def ref_q4_k(block):
    """ggml: { half d, dmin; uint8 scales[12]; uint8 qs[128]; }, as dequantize_row_q4_K does."""
    d, dmin, scales, qs = f16(block, 0), f16(block, 2), block[4:16], block[16:]

    def scale_min(j):
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


def ref_q6_k(block):
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


REFERENCES = {3: ref_q4_1, 6: ref_q5_0, 8: ref_q8_0, 12: ref_q4_k, 14: ref_q6_k}
HALVES = {3: (0, 2), 6: (0,), 8: (0,), 12: (0, 2), 14: (208,)}
"""Offsets of a block's float16 fields."""


def random_blocks(kind, seed, count):
    """Return uint8 `[count, block bytes]`: random bits, but finite float16 fields."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, LAYOUTS[kind].size_bytes), np.uint8)
    for at in HALVES[kind]:
        halves = rng.normal(0, 4, count).astype("<f2")
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    return blocks


@pytest.mark.parametrize("kind", sorted(QUANTISED), ids=lambda kind: LAYOUTS[kind].name)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5))
@settings(max_examples=25)
def test_every_block_format_unpacks_as_ggml_does(kind, seed, count):
    blocks = random_blocks(kind, seed, count)
    shape = count, LAYOUTS[kind].num_values
    gguf = read_gguf(gguf_bytes([], [(b"w", shape, kind, blocks.tobytes())]), LAYOUTS)
    got = gguf.tensors["w"].dequantize()
    expected = [REFERENCES[kind](block.tobytes()) for block in blocks]
    assert got.dtype == np.float32
    assert got.flags.writeable
    assert got.flags.c_contiguous
    np.testing.assert_allclose(got, np.array(expected), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("shape", [(3,), (2, 16), ()], ids=["odd", "across rows", "scalar"])
def test_a_shape_that_blocks_do_not_fill_is_rejected(shape):
    with pytest.raises(ModelError, match="blocks of 32"):
        read_gguf(gguf_bytes([], [(b"w", shape, 8, bytes(34))]), LAYOUTS)
