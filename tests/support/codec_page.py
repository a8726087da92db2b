"""Codecs as specified, implemented in numpy and plain Python, without the package's code."""

import math
import struct

import numpy as np

FLOAT32_MAX = float(np.finfo(np.float32).max)


def affine(values: np.ndarray) -> bytes:
    """A row of `full8`, of float32 or float16 values."""
    values = np.asarray(values, np.float32)
    if not np.isfinite(values).all():
        return bytes.fromhex("00000000 0000c07f") + bytes(len(values))
    low, high = values.min(), values.max()
    scale = rounded_up((float(high) - float(low)) / 255)
    half = np.float32(0.5 if float(high) - float(low) > FLOAT32_MAX else 1.0)
    divisor = np.float32(scale) * half if scale else np.float32(1)
    q = np.rint((values * half - low * half) / divisor).astype(np.uint8)
    return struct.pack("<ff", scale, float(low) + 0.0) + q.tobytes()


def rounded_up(value: float) -> float:
    nearest = np.float32(value)
    return float(nearest if float(nearest) >= value else np.nextafter(nearest, np.float32(np.inf)))


def read_affine(row: bytes) -> np.ndarray:
    """float32 [width]."""
    scale, zero = struct.unpack_from("<ff", row)
    q = np.frombuffer(row, np.uint8, offset=8)
    if abs(zero) + 255 * scale > 2.0**126:
        wide = zero + scale * q.astype(np.float64)
        return np.clip(wide, -FLOAT32_MAX, FLOAT32_MAX).astype(np.float32)
    return np.float32(zero) + np.float32(scale) * q.astype(np.float32)


def topk(values: np.ndarray, k: int) -> bytes:
    """A row of `topk8`."""
    order = sorted(range(len(values)), key=lambda index: (-abs(float(values[index])), index))
    indices = sorted(order[:k])
    form = "<u2" if len(values) <= 65536 else "<u4"
    return affine(values[indices]) + np.asarray(indices, form).tobytes()


def read_topk(row: bytes, k: int, hidden: int) -> np.ndarray:
    """float32 [hidden]."""
    values = read_affine(row[: 8 + k])
    found = np.full(hidden, np.nan if np.isnan(values).any() else 0, np.float32)
    found[np.frombuffer(row, "<u2" if hidden <= 65536 else "<u4", offset=8 + k)] = values
    return found


# ---------------------------------------------------------------- the projection

_WORD = (1 << 64) - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """One block of Philox4x64-10, from the paper's definition."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * 0xD2E7470EE14C6C93, c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (
            (second >> 64) ^ c1 ^ k0,
            second & _WORD,
            (first >> 64) ^ c3 ^ k1,
            first & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & _WORD, (k1 + 0xBB67AE8584CAA73B) & _WORD
    return c0, c1, c2, c3


def projection(k: int, hidden: int, seed: int) -> np.ndarray:
    """float32 [k, hidden]."""
    raw: list[int] = []
    while len(raw) < k * hidden + 1:
        raw += philox((len(raw) // 4 + 1, 0, 0, 0), (seed, 0))
    normals: list[float] = []
    for first, second in zip(raw[0::2], raw[1::2], strict=True):
        radius = math.sqrt(-2 * math.log(((first >> 11) + 1) / 2**53))
        angle = 2 * math.pi * ((second >> 11) / 2**53)
        normals += [radius * math.cos(angle), radius * math.sin(angle)]
    entries = np.array(normals[: k * hidden]) / math.sqrt(k)
    return entries.astype(np.float32).reshape(k, hidden)
