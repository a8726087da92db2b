"""Captured rows as bytes for transfer between processes: a safetensors file, see `pack`."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from midstream.results.activations import Activations
from midstream.results.arrays import Heads
from midstream.results.encoded_rows import Rows
from midstream.results.rows_file import (
    POSITIONS,
    TOKENS,
    header_of,
    heads_of,
    read_rows_file,
    source_of,
    widths_of,
)
from midstream.sites import Tap

if TYPE_CHECKING:
    import torch

_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_INDEX = 8  # bytes of a position or a token id
# Many requests capture the same taps at as many positions: their files have the same header.
_CACHED_HEADERS = 256

# (taps, number of rows, encoded rows without any) of a group of taps.
_Form = tuple[tuple[Tap, ...], int, Rows]


class PackedRows:
    """Rows that are packed when their bytes are asked for; see `pack`."""

    def __init__(self, activations: Activations, hidden: int, dtype: torch.dtype) -> None:
        """Create it; no row is looked at. `hidden` is the width of the residual stream."""
        self._activations = activations
        self._groups = activations.held.groups()
        forms = tuple([(group.taps, len(group), group.nothing) for group in self._groups])
        heads = tuple(activations.heads.items())
        about = header_of(activations.num_layers, activations.positions_of_media)
        about |= source_of(activations.source)
        known = tuple(about.items()), activations.codec.spec, hidden, dtype, heads
        self._header, size = _header_of(forms, *known)
        self.nbytes = len(self._header) + size

    def tobytes(self) -> bytes:
        """Return the bytes."""
        return b"".join(self.parts())

    def parts(self) -> list[bytes | memoryview]:
        """Return the bytes in parts, one after the other. Rows of one tap are not copied."""
        parts: list[bytes | memoryview] = [self._header]
        # In NumPy, which takes a few microseconds where torch takes tens.
        tokens = self._activations.held.token_array()
        for group in self._groups:
            times = len(group.taps)
            parts.append(group.places.tobytes() * times)
            parts.append(tokens[group.places].tobytes() * times)
        parts += [group.encoded().reshape(-1).data for group in self._groups]
        return parts


def pack(activations: Activations, hidden: int, dtype: torch.dtype) -> bytes:
    """Return rows as the bytes of a safetensors file.

    Tensor `{site}.{layer}` is [rows, width] in the model's dtype; for a lossy codec it is uint8
    [rows, bytes of a row], encoded as `midstream.codecs` describes. `{site}.{layer}.positions` and
    `{site}.{layer}.token_ids` are int64 [rows]. The metadata have `format`, `version`, `codec`,
    `hidden` and `dtype`, `num_layers` if it is known, and `media` if the prompt has any, a JSON
    list of the fields of `MediaSpan`. If vectors are not all as wide as
    `hidden`, the version is 2, and `widths` is a JSON object with the width of each of the other
    tensors by name. If some are of attention heads, one after the other, the version is 2 too, and
    `heads` is a JSON object with [number of heads, indices of those that are shown or null] by
    name; the tensors have all heads. Of rows that stay on the device `source` is the id of their
    request and `on_device` a JSON list of their names; the tensors are their lengths, [rows, 1].
    """
    return PackedRows(activations, hidden, dtype).tobytes()


def unpack(data: bytes) -> Activations:
    """Return the rows of a file from `pack`, bit for bit, or that `Activations.save` encoded."""
    return Activations(*read_rows_file(data))


@functools.lru_cache(maxsize=_CACHED_HEADERS)
def _header_of(
    forms: Sequence[_Form],
    about: Sequence[tuple[str, str]],
    codec: str,
    hidden: int,
    dtype: torch.dtype,
    heads: Sequence[tuple[Tap, Heads]],
) -> tuple[bytes, int]:
    """Return the header, and the bytes after it. Positions and token ids are first: aligned."""
    widths = {
        f"{site}.{layer}": nothing.hidden for taps, _, nothing in forms for site, layer in taps
    }
    metadata = {
        **dict(about),
        "codec": codec,
        "hidden": str(hidden),
        "dtype": str(dtype).removeprefix("torch."),
        **widths_of(widths, hidden),
        **heads_of(dict(heads)),
    }
    entries: dict[str, object] = {"__metadata__": metadata}
    offset = 0

    def add(names: Sequence[str], kind: str, shape: list[int], size: int) -> None:
        nonlocal offset
        for name in names:
            place = [offset, offset + size]
            entries[name] = {"dtype": kind, "shape": shape, "data_offsets": place}
            offset += size

    for taps, rows, _ in forms:
        for what in (POSITIONS, TOKENS):
            names = [f"{site}.{layer}.{what}" for site, layer in taps]
            add(names, "I64", [rows], rows * _INDEX)
    for taps, rows, nothing in forms:
        names = [f"{site}.{layer}" for site, layer in taps]
        size = nothing.codec.row_bytes(nothing.hidden, nothing.dtype)
        if codec == "raw":
            kind, width = _DTYPES[str(nothing.dtype).removeprefix("torch.")], nothing.hidden
        else:
            kind, width = "U8", size
        add(names, kind, [rows, width], rows * size)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offset
