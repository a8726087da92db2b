"""Captured rows as bytes that travel between processes: a safetensors file, see `pack`."""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
from torch import Tensor

from midstream import sites
from midstream.activations import Activations
from midstream.codecs import Raw, parse_codec
from midstream.errors import SpecError
from midstream.rows import Rows
from midstream.spec.tapping import order

FORMAT = "midstream.activations"
VERSION = "1"
_POSITIONS, _TOKENS = "positions", "token_ids"


def pack(activations: Activations, hidden: int, dtype: torch.dtype) -> bytes:
    """Rows as a safetensors file.

    `{site}.{layer}` is [rows, hidden] in the model's dtype; of rows that a codec has reduced, uint8
    [rows, bytes of a row] as `midstream.codecs` has them. `{site}.{layer}.positions` and
    `{site}.{layer}.token_ids` are int64 [rows]. The file's metadata have `codec`, `hidden` and
    `dtype`.

    Args:
        activations: the rows.
        hidden: width of the vectors that were captured.
        dtype: theirs.
    """
    from safetensors.torch import save

    is_raw = isinstance(activations.codec, Raw)
    tensors: dict[str, Tensor] = {}
    for site, layer in activations:
        name = f"{site}.{layer}"
        rows = activations[site, layer] if is_raw else activations.encoded(site, layer)
        tensors[name] = rows.contiguous()
        # What is shared cannot be stored: each entry gets its own copy.
        tensors[f"{name}.{_POSITIONS}"] = activations.positions_of(site, layer).clone()
        tensors[f"{name}.{_TOKENS}"] = activations.token_ids_of(site, layer).clone()
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "codec": activations.codec.spec,
        "hidden": str(hidden),
        "dtype": str(dtype).removeprefix("torch."),
    }
    packed: bytes = save(tensors, metadata)
    return packed


def unpack(data: bytes) -> Activations:
    """The rows that `pack` packed, bit by bit.

    Raises:
        SpecError: anything else.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        metadata = _metadata(data)
    except (SafetensorError, ValueError, KeyError, struct.error) as error:
        raise SpecError("", f"expected a safetensors file of captured rows: {error}") from None
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise SpecError("", f"expected a file of {FORMAT}, version {VERSION}, got {metadata}")
    codec = parse_codec(metadata.get("codec", "raw"))
    dtype = getattr(torch, metadata.get("dtype", ""), None)
    hidden = metadata.get("hidden", "")
    if not isinstance(dtype, torch.dtype) or not hidden.isdecimal():
        raise SpecError("", f"dtype or hidden of the file is none: {metadata}")
    values: dict[tuple[str, int], Tensor | Rows] = {}
    positions: dict[tuple[str, int], Tensor] = {}
    length = 0
    for name, rows in tensors.items():
        site, _, layer = name.partition(".")
        if site in sites.NAMES and layer.isdecimal():
            tap = (site, int(layer))
            positions[tap] = _indices(tensors, name, _POSITIONS, len(rows))
            if len(rows):
                length = max(length, int(positions[tap].max()) + 1)
            values[tap] = (
                rows
                if isinstance(codec, Raw)
                else Rows(codec, int(hidden), dtype, (rows[:, None],), (0,))
            )
    tokens = torch.zeros(length, dtype=torch.int64)
    for (site, layer), there in positions.items():
        tokens[there] = _indices(tensors, f"{site}.{layer}", _TOKENS, len(there))
    ordered = sorted(values, key=order)
    return Activations(
        {tap: values[tap] for tap in ordered}, {tap: positions[tap] for tap in ordered}, tokens
    )


def _indices(tensors: dict[str, Tensor], name: str, what: str, rows: int) -> Tensor:
    found = tensors.get(f"{name}.{what}")
    if found is None or found.dtype != torch.int64 or found.shape != (rows,):
        raise SpecError("", f"{name}.{what}: expected int64 [{rows}]")
    if rows and (int(found.min()) < 0 or int(found.max()) > 1 << 31):
        raise SpecError("", f"{name}.{what}: out of range")
    return found


def _metadata(data: bytes) -> dict[str, Any]:
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}
