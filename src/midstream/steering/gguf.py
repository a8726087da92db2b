"""Reader of GGUF files: metadata, and F32 and F16 tensors as float32. Every count, size and offset
is checked before it is used; every error is a `ModelError`. The layout, little-endian: magic,
version, tensor and key counts; keys, each a string, a kind and a value; per tensor a name, shape
(fastest first), GGML type and offset; padding; the tensors' blocks.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from midstream.errors import ModelError
from midstream.validation import show

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_NESTING = 4
MAX_METADATA = 1 << 20  # numbers in all arrays of metadata: some 30 ms in which nothing else runs
MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class TensorLayout:
    """Blocks of a GGML type; `unpack`: uint8 [blocks, size_bytes] to float32 [blocks, values]."""

    name: str
    num_values: int
    size_bytes: int
    unpack: Callable[[Bytes], Floats]


# By GGML type. Quantised types, which models have, are in `midstream.lab.demo.model`.
LAYOUTS: Mapping[int, TensorLayout] = {
    0: TensorLayout("F32", 1, 4, lambda blocks: np.ascontiguousarray(blocks).view("<f4")),
    1: TensorLayout(
        "F16", 1, 2, lambda blocks: np.ascontiguousarray(blocks).view("<f2").astype(np.float32)
    ),
}


@dataclass(frozen=True)
class Tensor:
    """One encoded tensor, slowest dimension first as in torch; `raw`: uint8 [bytes], a view."""

    layout: TensorLayout
    shape: tuple[int, ...]
    raw: Bytes

    def dequantize(self) -> Floats:
        """Decode to float32 `[*shape]`, contiguous and writable."""
        values = self.layout.unpack(self.raw.reshape(-1, self.layout.size_bytes))
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


def read_gguf(
    data: bytes, layouts: Mapping[int, TensorLayout] = LAYOUTS, architecture: str = ""
) -> Gguf:
    """Parse a file's bytes, which tensors view; `architecture` is the one required, "" for any."""
    cursor = _Cursor(data)
    if cursor.bytes(4) != MAGIC:
        raise ModelError(f"GGUF: expected the file to start with {MAGIC!r}, got {data[:4]!r}")
    version = cursor.scalar("I")
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in VERSIONS:
        raise ModelError(
            f"GGUF: the file is version {swapped} in big-endian byte order, and only little-endian "
            "files are read: convert it with the `gguf` package's gguf-convert-endian"
        )
    if version not in VERSIONS:
        raise ModelError(f"GGUF: expected version {VERSIONS}, got {version}")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    got = metadata.get("general.architecture")
    if architecture and got != architecture:
        # Checked before the tensors: another architecture explains an unsupported type.
        shown = "none" if got is None else show(str(got))
        raise ModelError(f"GGUF: expected general.architecture = {architecture!r}, got {shown}")
    infos = [_read_info(cursor) for _ in range(num_tensors)]
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1:
        raise ModelError(f"GGUF: expected a positive general.alignment, got {align!r}")
    base = -(-cursor.position // align) * align
    tensors: dict[str, Tensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ModelError(f"GGUF: tensor {name!r} occurs twice")
        if kind not in layouts:
            known = ", ".join(
                f"{ggml_type} ({layout.name})" for ggml_type, layout in layouts.items()
            )
            raise ModelError(f"GGUF: tensor {name!r} has GGML type {kind}; expected one of {known}")
        tensors[name] = _view_tensor(data, name, shape, layouts[kind], base + offset)
    nbytes = sum(tensor.raw.size for tensor in tensors.values())
    if nbytes > len(data):
        # Decoded, each tensor is a copy of the bytes that it shares with others.
        raise ModelError(f"GGUF: the tensors have {nbytes} bytes, and the file has {len(data)}")
    return Gguf(metadata, tensors)


class _Cursor:
    """Sequential reader of values; reading past the end raises ModelError."""

    def __init__(self, data: bytes) -> None:
        self.data = memoryview(data)
        self.position = 0
        self._numbers = 0  # in arrays so far

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
            self._numbers += count
            if self._numbers > MAX_METADATA:
                raise ModelError(f"GGUF: more than {MAX_METADATA} numbers of metadata")
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


def _view_tensor(
    data: bytes, name: str, shape: tuple[int, ...], layout: TensorLayout, start: int
) -> Tensor:
    """Return a tensor after checking its shape and place; `start` is its offset in `data`."""
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
    return Tensor(layout, shape, np.frombuffer(data, np.uint8, num_bytes, start))
