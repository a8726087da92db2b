"""Quantised tensors, against llama.cpp's own package."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_file import gguf_bytes

from midstream.errors import ModelError
from midstream.lab.demo.model.quantised import LAYOUTS, QUANTISED
from midstream.steering.gguf import read_gguf

# Offsets of a block's float16 fields.
HALVES = {3: (0, 2), 6: (0,), 8: (0,), 12: (0, 2), 14: (208,)}


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
    file = read_gguf(gguf_bytes([], [(b"w", shape, kind, blocks.tobytes())]), LAYOUTS)
    got = file.tensors["w"].dequantize()
    assert got.dtype == np.float32
    assert got.flags.writeable
    assert got.flags.c_contiguous
    expected = dequantize(blocks, GGMLQuantizationType(kind))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("shape", [(3,), (2, 16), ()], ids=["odd", "across rows", "scalar"])
def test_a_shape_that_blocks_do_not_fill_is_rejected(shape):
    with pytest.raises(ModelError, match="blocks of 32"):
        read_gguf(gguf_bytes([], [(b"w", shape, 8, bytes(34))]), LAYOUTS)
