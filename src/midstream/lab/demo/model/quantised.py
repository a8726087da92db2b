"""Unpackers of GGML's quantised tensors: uint8 `[blocks, bytes]` to float32 `[blocks, values]`."""

from __future__ import annotations

import numpy as np

from midstream.steering.gguf import LAYOUTS as UNQUANTISED
from midstream.steering.gguf import Bytes, Floats, TensorLayout


def _half(blocks: Bytes, at: int) -> Floats:
    """Return the float16 at byte `at` of each block, as a float32 column."""
    halves: Floats = blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)
    return halves


def _nibbles(packed: Bytes) -> Bytes:
    """Return the low halves of the bytes of each row, followed by the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _unpack_q4_1(blocks: Bytes) -> Floats:
    values: Floats = _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)
    return values


def _unpack_q5_0(blocks: Bytes) -> Floats:
    fifth = np.unpackbits(blocks[:, 2:6], axis=1, bitorder="little")
    values: Floats = _half(blocks, 0) * (
        (_nibbles(blocks[:, 6:]) | fifth << 4).astype(np.int8) - 16
    )
    return values


def _unpack_q8_0(blocks: Bytes) -> Floats:
    values: Floats = _half(blocks, 0) * blocks[:, 2:].copy().view(np.int8)
    return values


def _unpack_q4_k(blocks: Bytes) -> Floats:
    low, high, mixed = np.split(blocks[:, 4:16], 3, axis=1)
    scales = np.concatenate([low & 63, mixed & 15 | low >> 6 << 4], axis=1)
    floors = np.concatenate([high & 63, mixed >> 4 | high >> 6 << 4], axis=1)
    scale, floor = _half(blocks, 0) * scales, _half(blocks, 2) * floors
    values = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return np.reshape(scale[..., None] * values - floor[..., None], (-1, 256))


def _unpack_q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64))
    shifts = np.array([[0], [2], [4], [6]], np.uint8)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts
    values = (low | (high.reshape(-1, 2, 128) & 3) << 4).astype(np.int8) - 32
    scale = _half(blocks, 208) * blocks[:, 192:208].copy().view(np.int8)
    return np.reshape(scale[..., None] * values.reshape(-1, 16, 16), (-1, 256))


QUANTISED = {
    3: TensorLayout("Q4_1", 32, 20, _unpack_q4_1),
    6: TensorLayout("Q5_0", 32, 22, _unpack_q5_0),
    8: TensorLayout("Q8_0", 32, 34, _unpack_q8_0),
    12: TensorLayout("Q4_K", 256, 144, _unpack_q4_k),
    14: TensorLayout("Q6_K", 256, 210, _unpack_q6_k),
}
LAYOUTS = {**UNQUANTISED, **QUANTISED}
"""Layouts of all types that SmolLM2's file may have, by GGML type."""
