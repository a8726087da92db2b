"""Reader of a safetensors file of captured rows."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from midstream import sites
from midstream.errors import CodecError, SpecError, UnsupportedError
from midstream.plan.vectors.device_row import DeviceSource
from midstream.results.arrays import PER_DIM, Heads, array_of, load_tensors
from midstream.results.encoded_rows import Rows
from midstream.results.media_span import MediaSpan, read_spans, spans_to_json
from midstream.sites import Tap, order
from midstream.validation import INT_LIMIT, is_int, read_json, show

if TYPE_CHECKING:
    import torch
    from torch import Tensor

FORMAT = "midstream.activations"
VERSION = "1"
# Of files with rows of several widths or of heads, which readers of version 1 reject.
WIDTHS_VERSION = "2"
# Above any context length; bounds the memory that a hostile file can make its reader allocate.
MAX_POSITION = 1 << 26
# Far above any model's; also bounds the memory, as encoded rows can be much shorter than decoded.
MAX_WIDTH = 1 << 20
POSITIONS, TOKENS = "positions", "token_ids"
_TAP = re.compile(
    r"(?P<site>[a-z_]+)\.(?P<layer>0|[1-9][0-9]{0,5})(\.(?P<what>positions|token_ids))?"
)
_NUMBER = re.compile("[1-9][0-9]{0,8}")


def read_rows_file(
    data: bytes,
) -> tuple[
    dict[Tap, Tensor | Rows],
    dict[Tap, Tensor],
    Tensor,
    int | None,
    dict[Tap, Heads],
    tuple[MediaSpan, ...],
]:
    """Return the arguments of `Activations` from the bytes of a file; see `serialization.pack`."""
    from safetensors import SafetensorError

    try:
        tensors = load_tensors(data)
        metadata = _metadata(data)
    except (SafetensorError, ValueError, KeyError, struct.error) as error:
        raise SpecError("", f"expected a safetensors file of captured rows: {error}") from None
    versions = (VERSION, WIDTHS_VERSION)
    if metadata.get("format") != FORMAT or metadata.get("version") not in versions:
        raise SpecError(
            "",
            f"expected a file of {FORMAT}, version {' or '.join(versions)}, got "
            f"{show(str(metadata))}",
        )
    taps = _taps(tensors)
    names = [f"{site}.{layer}" for site, layer in taps]
    widths, heads = _widths(metadata, names), _heads(metadata, names)
    if "hidden" not in metadata:
        metadata |= _described(tensors)
        widths = {name: tensors[name].shape[-1] for name in names if tensors[name].ndim == 2}
    check = _checker(metadata, widths)
    values: dict[Tap, Tensor | Rows] = {}
    heads_of_taps: dict[Tap, Heads] = {}
    positions: dict[Tap, Tensor] = {}
    tokens: list[tuple[Any, Any]] = []
    for tap in sorted(taps, key=order):
        name = f"{tap[0]}.{tap[1]}"
        values[tap] = check(name, tensors[name])
        if name in heads:
            heads_of_taps[tap] = _checked_heads(name, values[tap], heads[name])
        positions[tap] = _indices(tensors, name, POSITIONS, len(values[tap]), MAX_POSITION)
        ids = _indices(tensors, name, TOKENS, len(values[tap]), INT_LIMIT)
        tokens.append((np.asarray(positions[tap]), np.asarray(ids)))
    # Pages of zeros that nothing is written to take no memory.
    length = max((int(where.max()) + 1 for where, _ in tokens if len(where)), default=0)
    token_ids = np.zeros(length, np.int64)
    for where, ids in tokens:
        token_ids[where] = ids
    count = metadata.get("num_layers", "")
    num_layers = int(count) if _NUMBER.fullmatch(count) else None
    tokens_of_rows = array_of(token_ids, "int64")
    return values, positions, tokens_of_rows, num_layers, heads_of_taps, _media(metadata)


def header_of(num_layers: int | None, media: Sequence[MediaSpan]) -> dict[str, str]:
    """Return the metadata that every file of captured rows has; None: the number is unknown."""
    header = {"format": FORMAT, "version": VERSION}
    if num_layers is not None:
        header["num_layers"] = str(num_layers)
    if media:
        header["media"] = json.dumps(spans_to_json(media), separators=(",", ":"))
    return header


def widths_of(widths: Mapping[str, int], hidden: int) -> dict[str, str]:
    """Return metadata for widths by name, such as `attn_out.1`; empty if all are `hidden`."""
    others = {name: width for name, width in widths.items() if width != hidden}
    text = json.dumps(others, separators=(",", ":"))
    return {"version": WIDTHS_VERSION, "widths": text} if others else {}


def heads_of(heads: Mapping[Tap, Heads]) -> dict[str, str]:
    """Return metadata for rows of heads, which replace those of `header_of`; empty without any."""
    named = {f"{site}.{layer}": tap_heads for (site, layer), tap_heads in heads.items()}
    text = json.dumps(named, separators=(",", ":"))
    return {"version": WIDTHS_VERSION, "heads": text} if named else {}


def source_of(source: DeviceSource | None) -> dict[str, str]:
    """Return metadata for rows that stay on the device; empty without any."""
    if source is None:
        return {}
    names = [f"{site}.{layer}" for site, layer in sorted(source.taps, key=order)]
    return {"source": source.id, "on_device": json.dumps(names, separators=(",", ":"))}


def _widths(metadata: Mapping[str, Any], names: Sequence[str]) -> dict[str, int]:
    """Return the widths that a file's metadata state, by names of its tensors of rows."""
    text = metadata.get("widths")
    if text is None and (metadata["version"] == VERSION or "heads" in metadata):
        return {}
    widths = read_json(text) if isinstance(text, str) else None
    if (
        metadata["version"] == VERSION
        or "hidden" not in metadata
        or not isinstance(widths, dict)
        or not widths
        or not all(is_int(width) and _NUMBER.fullmatch(str(width)) for width in widths.values())
        or not set(widths) <= set(names)
    ):
        raise SpecError(
            "",
            f"version {metadata['version']}, widths {show(str(text))}: expected version "
            f"{WIDTHS_VERSION} and the positive width of some of the file's tensors by name",
        )
    return widths


def _heads(metadata: Mapping[str, Any], names: Sequence[str]) -> dict[str, Heads]:
    """Return the heads that a file's metadata state, by names of its tensors of rows."""
    text = metadata.get("heads")
    if text is None:
        return {}
    try:
        heads = msgspec.convert(read_json(text), dict[str, Heads])
    except (SpecError, msgspec.ValidationError):
        heads = {}
    if metadata["version"] == VERSION or not heads or not set(heads) <= set(names):
        raise SpecError(
            "",
            f"version {metadata['version']}, heads {show(str(text))}: expected version "
            f"{WIDTHS_VERSION} and [number of heads, those to show or null] of some of the file's "
            "tensors by name",
        )
    return heads


def _media(metadata: Mapping[str, Any]) -> tuple[MediaSpan, ...]:
    """Return the media that a file's metadata state."""
    text = metadata.get("media", "[]")
    try:
        value = read_json(text)
    except (SpecError, TypeError):
        value = text
    return read_spans(value)


def _checked_heads(name: str, rows: Any, heads: Heads) -> Heads:
    is_sketch = False
    if isinstance(rows, Rows):
        from midstream.codecs import Rp8

        width, is_sketch = rows.hidden, isinstance(rows.codec, Rp8)
    else:
        width = rows.shape[1]
    count, chosen = heads
    fits = 1 <= count <= width and width % count == 0 and not is_sketch
    if chosen is not None:
        fits = fits and bool(chosen) and len(set(chosen)) == len(chosen)
        fits = fits and min(chosen) >= 0 and max(chosen) < count
    if not fits:
        raise SpecError("", f"{name}: {width} numbers cannot be of heads {show(str(list(heads)))}")
    return heads


def _checker(
    metadata: Mapping[str, Any], widths: Mapping[str, int]
) -> Callable[[str, Any], Tensor | Rows]:
    """Return a function that checks a tensor of a file and returns it as `Activations` takes it."""
    hidden = metadata.get("hidden", "")
    invalid = SpecError("", f"the file's dtype or hidden is invalid: {show(str(metadata))}")
    if not _NUMBER.fullmatch(hidden):
        raise invalid

    def width(name: str) -> int:
        return widths.get(name, int(hidden))

    try:
        import torch

        from midstream.codecs import Raw, parse_codec
    except ModuleNotFoundError:
        if metadata.get("codec", "raw") != "raw":
            raise UnsupportedError(
                f"rows of codec {metadata['codec']!r} are decoded by torch, which is not "
                "installed; install torch, or capture with the codec `raw`"
            ) from None
        return lambda name, tensor: _sized(name, tensor, None, width(name))
    if metadata.get("codec") == PER_DIM:
        return lambda name, tensor: _decoded_block(name, tensor, width(name))
    codec = parse_codec(metadata.get("codec", "raw"))
    dtype = getattr(torch, metadata.get("dtype", ""), None)
    if not isinstance(dtype, torch.dtype):
        raise invalid
    if isinstance(codec, Raw):
        return lambda name, tensor: _sized(name, tensor, dtype, width(name))

    def encoded(name: str, tensor: Any) -> Rows:
        if width(name) > MAX_WIDTH:
            raise SpecError("", f"{name}: rows of {width(name)} numbers; at most {MAX_WIDTH}")
        rows = _sized(name, tensor, torch.uint8, codec.row_bytes(width(name), dtype))
        return Rows(codec, width(name), dtype, (rows[:, None],), (0,))

    return encoded


def _decoded_block(name: str, block: Any, width: int) -> Tensor:
    """Return rows of `Activations.save(codec="full8:per=dim")`, decoded."""
    from midstream.codecs import Full8PerDim

    try:
        rows = Full8PerDim().decode(block)
    except CodecError as error:
        raise SpecError("", f"{name}: {error}") from None
    if rows.shape[1] != width:
        raise SpecError("", f"{name}: expected uint8 [{width}, 8 + rows]")
    return rows


def _sized(name: str, tensor: Any, dtype: torch.dtype | None, width: int) -> Any:
    if (
        (dtype is not None and tensor.dtype != dtype)
        or tensor.ndim != 2
        or tensor.shape[1] != width
    ):
        raise SpecError("", f"{name}: expected {dtype or 'numbers'} [rows, {width}]")
    return tensor


def _taps(tensors: Mapping[str, Any]) -> list[Tap]:
    taps = []
    for name in tensors:
        match = _TAP.fullmatch(name)
        if match is None or match["site"] not in sites.NAMES:
            raise SpecError("", f"unknown tensor {show(name)}; expected {{site}}.{{layer}}")
        if match["what"] is None:
            taps.append((match["site"], int(match["layer"])))
        elif name.rpartition(".")[0] not in tensors:
            raise SpecError("", f"{show(name)}: the tensor of its rows is missing")
    return taps


def _indices(tensors: Mapping[str, Any], name: str, what: str, rows: int, limit: int) -> Any:
    indices = tensors.get(f"{name}.{what}")
    if (
        indices is None
        or str(indices.dtype).removeprefix("torch.") != "int64"
        or indices.shape != (rows,)
    ):
        raise SpecError("", f"{name}.{what}: expected int64 [{rows}]")
    if rows and (int(indices.min()) < 0 or int(indices.max()) > limit):
        raise SpecError("", f"{name}.{what}: out of range")
    return indices


def _metadata(data: bytes) -> dict[str, Any]:
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def _described(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the width and dtype of decoded rows, which `Activations.save` writes without them."""
    for name, tensor in tensors.items():
        if name.count(".") == 1 and tensor.ndim == 2:
            return {
                "hidden": str(tensor.shape[1]),
                "dtype": str(tensor.dtype).removeprefix("torch."),
            }
    return {"hidden": "1", "dtype": "float32"}
