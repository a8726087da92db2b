"""Reader of GGUF files: metadata, and tensors as float32.

Files are untrusted: every count, size and offset is checked against the file's length before it is
used, and every error is a `ModelError`.

The layout, little-endian: magic, version, tensor count, key count; the keys, each a string, a
kind and a value; per tensor a name, a shape (fastest dimension first), a GGML type and an offset;
padding up to the alignment; the tensors' blocks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.errors import ModelError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_NESTING = 4
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class Tensor:
    """One encoded tensor.

    Attributes:
        kind: its GGML type, a key of `LAYOUTS`.
        shape: slowest dimension first, as in torch; the file has the reverse order.
        raw: uint8 `[bytes]`, its blocks, a view of the file's bytes.
    """

    kind: int
    shape: tuple[int, ...]
    raw: Bytes

    def dequantize(self) -> Floats:
        """Decode to float32 `[*shape]`, contiguous and writable."""
        layout = LAYOUTS[self.kind]
        values = layout.unpack(self.raw.reshape(-1, layout.size_bytes))
        return np.require(values, np.float32, ["C", "W"]).reshape(self.shape)


@dataclass(frozen=True)
class Gguf:
    """Contents of a file: metadata by key and tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def __getitem__(self, key: str) -> Any:
        """Return the metadata under `key`; raises ModelError if it is missing."""
        try:
            return self.metadata[key]
        except KeyError:
            raise ModelError(
                f"GGUF: missing metadata {key!r}; is it another model's file?"
            ) from None


def read_gguf(data: bytes) -> Gguf:
    """Parse the bytes of a file. Tensors are views of `data` and keep it in memory.

    Raises:
        ModelError: `data` is not a GGUF file, or is damaged or unsupported.
    """
    cursor = _Cursor(data)
    if cursor.bytes(4) != MAGIC:
        raise ModelError(f"GGUF: expected the file to start with {MAGIC!r}, got {data[:4]!r}")
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise ModelError(f"GGUF: expected version {VERSIONS}, got {version}")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = [_read_info(cursor) for _ in range(num_tensors)]
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1:
        raise ModelError(f"GGUF: expected a positive general.alignment, got {align!r}")
    base = -(-cursor.position // align) * align
    tensors: dict[str, Tensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ModelError(f"GGUF: tensor {name!r} occurs twice")
        tensors[name] = _view_tensor(data, name, shape, kind, base + offset)
    return Gguf(metadata, tensors)


class _Cursor:
    """Sequential reader of values; reading past the end raises ModelError."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.position = 0

    def bytes(self, count: int) -> bytes:
        start = self.position
        if count > len(self.data) - start:
            raise ModelError(
                f"GGUF: the file ends at byte {len(self.data)}, within {count} bytes that start"
                f" at {start}; it is truncated or damaged"
            )
        self.position += count
        return bytes(self.data[start : self.position])

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack("<" + code, self.bytes(struct.calcsize("<" + code)))
        return value

    def string(self) -> str:
        start = self.position
        try:
            return str(self.bytes(self.scalar("Q")), "utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"GGUF: the string at byte {start} is not UTF-8: {error}") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind != ARRAY or depth == MAX_NESTING:
            raise ModelError(f"GGUF: unsupported value of kind {kind} before byte {self.position}")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            # Read first, which checks the count before it becomes part of a `struct` format.
            code = SCALARS[kind]
            raw = self.bytes(count * struct.calcsize("<" + code))
            return list(struct.unpack(f"<{count}{code}", raw))
        return [self.value(kind, depth + 1) for _ in range(count)]


def _read_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Read a tensor's name, shape (slowest dimension first), GGML type and offset."""
    name = cursor.string()
    num_dimensions = cursor.scalar("I")
    if num_dimensions > MAX_DIMENSIONS:
        raise ModelError(
            f"GGUF: tensor {name!r} has {num_dimensions} dimensions, expected at most"
            f" {MAX_DIMENSIONS}"
        )
    shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")


def _view_tensor(data: bytes, name: str, shape: tuple[int, ...], kind: int, start: int) -> Tensor:
    layout = LAYOUTS.get(kind)
    if layout is None:
        raise ModelError(
            f"GGUF: tensor {name!r} has GGML type {kind}, expected one of {sorted(LAYOUTS)}"
        )
    num_values = math.prod(shape)
    # Blocks run along the fastest dimension and never across its end.
    if num_values < 1 or (shape[-1] if shape else 1) % layout.num_values:
        raise ModelError(
            f"GGUF: tensor {name!r} of shape {shape} is not a multiple of blocks of"
            f" {layout.num_values} values"
        )
    num_bytes = num_values // layout.num_values * layout.size_bytes
    if start + num_bytes > len(data):
        raise ModelError(
            f"GGUF: tensor {name!r} needs bytes {start} to {start + num_bytes}, the file has"
            f" {len(data)}; it is truncated or damaged"
        )
    return Tensor(kind, shape, np.frombuffer(data, np.uint8, num_bytes, start))


# --- GGML's blocks: uint8 [blocks, bytes] -> float32 [blocks, values] ---


def _half(blocks: Bytes, at: int) -> Floats:
    """Return the float16 at byte `at` of each block, as a float32 column."""
    halves: Floats = blocks[:, at : at + 2].copy().view("<f2").astype(np.float32)
    return halves


def _nibbles(packed: Bytes) -> Bytes:
    """Return the low halves of the bytes of each row, followed by the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _unpack_f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f4")


def _unpack_f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


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


@dataclass(frozen=True)
class Layout:
    """Block layout of one GGML type.

    Attributes:
        name: GGML's name.
        num_values: values per block.
        size_bytes: bytes per block.
        unpack: uint8 `[blocks, size_bytes]` -> float32 `[blocks, num_values]`.
    """

    name: str
    num_values: int
    size_bytes: int
    unpack: Callable[[Bytes], Floats]


LAYOUTS: dict[int, Layout] = {
    0: Layout("F32", 1, 4, _unpack_f32),
    1: Layout("F16", 1, 2, _unpack_f16),
    3: Layout("Q4_1", 32, 20, _unpack_q4_1),
    6: Layout("Q5_0", 32, 22, _unpack_q5_0),
    8: Layout("Q8_0", 32, 34, _unpack_q8_0),
    12: Layout("Q4_K", 256, 144, _unpack_q4_k),
    14: Layout("Q6_K", 256, 210, _unpack_q6_k),
}
