"""Captured rows as bytes for transfer between processes: a safetensors file, see `pack`."""

from __future__ import annotations

import json
import re
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from midstream import sites
from midstream.codecs import Codec, Raw, parse_codec
from midstream.errors import SpecError
from midstream.results.activations import Activations
from midstream.results.encoded_rows import Rows
from midstream.sites import order
from midstream.validation import INT_LIMIT, show

FORMAT = "midstream.activations"
VERSION = "1"
# Above any context length; bounds the memory that a hostile file can make its reader allocate.
MAX_POSITION = 1 << 26
_POSITIONS, _TOKENS = "positions", "token_ids"
_TAP = re.compile(
    r"(?P<site>[a-z_]+)\.(?P<layer>0|[1-9][0-9]{0,5})(\.(?P<what>positions|token_ids))?"
)
_NUMBER = re.compile("[1-9][0-9]{0,8}")


def pack(activations: Activations, hidden: int, dtype: torch.dtype) -> bytes:
    """Return rows as the bytes of a safetensors file.

    Tensor `{site}.{layer}` is [rows, hidden] in the model's dtype; for a lossy codec it is uint8
    [rows, bytes of a row], encoded as `midstream.codecs` describes. `{site}.{layer}.positions` and
    `{site}.{layer}.token_ids` are int64 [rows]. The metadata have `format`, `version`, `codec`,
    `hidden` and `dtype`.

    Args:
        activations: the rows.
        hidden: width of the captured vectors.
        dtype: dtype of the captured vectors.
    """
    from safetensors.torch import save

    is_raw = isinstance(activations.codec, Raw)
    tensors: dict[str, Tensor] = {}
    for site, layer in activations:
        name = f"{site}.{layer}"
        rows = activations[site, layer] if is_raw else activations.encoded(site, layer)
        tensors[name] = rows.contiguous()
        # safetensors rejects tensors that share memory: copy them.
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
    """Return the rows of a file from `pack`, bit for bit.

    Raises:
        SpecError: the bytes are not such a file.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
        metadata = _metadata(data)
    except (SafetensorError, ValueError, KeyError, struct.error) as error:
        raise SpecError("", f"expected a safetensors file of captured rows: {error}") from None
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        raise SpecError(
            "", f"expected a file of {FORMAT}, version {VERSION}, got {show(str(metadata))}"
        )
    codec = parse_codec(metadata.get("codec", "raw"))
    dtype = getattr(torch, metadata.get("dtype", ""), None)
    hidden = metadata.get("hidden", "")
    if not isinstance(dtype, torch.dtype) or not _NUMBER.fullmatch(hidden):
        raise SpecError("", f"the file's dtype or hidden is invalid: {show(str(metadata))}")
    vectors = _Vectors(codec, int(hidden), dtype)
    values: dict[tuple[str, int], Tensor | Rows] = {}
    positions: dict[tuple[str, int], Tensor] = {}
    tokens = torch.zeros(0, dtype=torch.int64)
    for tap in sorted(_taps(tensors), key=order):
        name = f"{tap[0]}.{tap[1]}"
        values[tap] = vectors.rows(name, tensors[name])
        positions[tap] = _indices(tensors, name, _POSITIONS, len(tensors[name]), MAX_POSITION)
        ids = _indices(tensors, name, _TOKENS, len(tensors[name]), INT_LIMIT)
        length = int(positions[tap].max()) + 1 if len(ids) else 0
        if length > len(tokens):
            tokens = torch.cat([tokens, tokens.new_zeros(length - len(tokens))])
        tokens[positions[tap]] = ids
    return Activations(values, positions, tokens)


class _Vectors(NamedTuple):
    """Properties of the captured vectors, from a file's metadata."""

    codec: Codec
    hidden: int
    dtype: torch.dtype

    def rows(self, name: str, found: Tensor) -> Tensor | Rows:
        """Check one tensor of the file, and return it as `Activations` takes it."""
        is_raw = isinstance(self.codec, Raw)
        width = self.hidden if is_raw else self.codec.row_bytes(self.hidden, self.dtype)
        dtype = self.dtype if is_raw else torch.uint8
        if found.dtype != dtype or found.ndim != 2 or found.shape[1] != width:
            raise SpecError("", f"{name}: expected {dtype} [rows, {width}]")
        if is_raw:
            return found
        return Rows(self.codec, self.hidden, self.dtype, (found[:, None],), (0,))


def _taps(tensors: dict[str, Tensor]) -> list[tuple[str, int]]:
    """Return the (site, layer) pairs of a file's tensors.

    Raises:
        SpecError: a tensor's name is unknown, or its rows are missing.
    """
    found = []
    for name in tensors:
        match = _TAP.fullmatch(name)
        if match is None or match["site"] not in sites.NAMES:
            raise SpecError("", f"unknown tensor {show(name)}; expected {{site}}.{{layer}}")
        if match["what"] is None:
            found.append((match["site"], int(match["layer"])))
        elif name.rpartition(".")[0] not in tensors:
            raise SpecError("", f"{show(name)}: the tensor of its rows is missing")
    return found


def _indices(tensors: dict[str, Tensor], name: str, what: str, rows: int, limit: int) -> Tensor:
    found = tensors.get(f"{name}.{what}")
    if found is None or found.dtype != torch.int64 or found.shape != (rows,):
        raise SpecError("", f"{name}.{what}: expected int64 [{rows}]")
    if rows and (int(found.min()) < 0 or int(found.max()) > limit):
        raise SpecError("", f"{name}.{what}: out of range")
    return found


def _metadata(data: bytes) -> dict[str, Any]:
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    found = header.get("__metadata__") if isinstance(header, dict) else None
    return found if isinstance(found, dict) else {}
