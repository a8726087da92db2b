"""Shard layout and header; `docs/store-format.md` specifies every byte, which a reader compares."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from midstream import sites
from midstream.errors import SpecError, StoreError
from midstream.sites import Tap
from midstream.store.backends.base import is_shard_name
from midstream.store.format.entry import MAX_LAYER, Header
from midstream.validation import is_int, read_json, show

FORMAT = "midstream.store"
VERSION = "1"
# Of shards with taps of another width than the hidden size, which readers of version 1 reject.
WIDTHS_VERSION = "2"
BLOCK = 1 << 16  # bytes per checksum
CHECKSUM = f"crc32:{BLOCK}"
ALIGNMENT = 64

MAX_HEADER = 4 << 20
MAX_REQUESTS = 16 << 20  # bytes of the lines of all requests
MAX_METADATA = 16 << 20  # bytes of one request's metadata
MAX_ROWS = 1 << 40
MAX_POSITION = (1 << 26) - 1

_COLUMNS = (("position", "I64", 8), ("token_id", "I64", 8), ("request", "I32", 4))
_BYTES_PER_ROW = sum(size for _, _, size in _COLUMNS)
_TENSOR = re.compile(r"g(0|[1-9][0-9]{0,5})\.(?:request|([a-z_]{1,32})\.(0|[1-9][0-9]{0,4}))")
_TAP = re.compile(r"([a-z_]{1,32})\.(0|[1-9][0-9]{0,4})")
_TEXTS = ("model", "revision", "dtype", "codec", "vllm", "midstream")  # fields of `Header`
_SITE_ORDER = {name: order for order, name in enumerate(sites.NAMES)}


@dataclass(frozen=True, slots=True)
class Place:
    """Dtype, shape and byte range of a tensor, relative to the start of the first tensor."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def entry(self) -> dict[str, object]:
        offsets = [self.start, self.stop]
        return {"dtype": self.dtype, "shape": list(self.shape), "data_offsets": offsets}


@dataclass(frozen=True, slots=True)
class Group:
    """Taps whose rows have the same requests, positions and tokens."""

    taps: tuple[Tap, ...]  # in `tap_order`
    rows: int  # of each tap


@dataclass(frozen=True, slots=True)
class Layout:
    """The contents of a shard's header."""

    header: Header
    groups: tuple[Group, ...]
    requests_bytes: int
    metadata_bytes: int  # of the requests' metadata, with spaces that align the checksums
    replaces: tuple[str, ...] = ()  # names of the shards that this one was made from and replaces

    def head(self) -> bytes:
        """Return the bytes before the first tensor: the header's length and the header."""
        about = {
            "format": FORMAT,
            "version": WIDTHS_VERSION if self.header.widths else VERSION,
            "checksum": CHECKSUM,
            "replaces": " ".join(self.replaces),
        }
        for name, value in self.header.to_dict().items():
            about[name] = _compact(value) if isinstance(value, dict) else str(value)
        tensors = {name: place.entry() for name, place in self.places().items()}
        text = _compact({"__metadata__": about, **tensors}).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        return len(text).to_bytes(8, "little") + text

    def places(self) -> dict[str, Place]:
        """Return every tensor by name, in the shard's order, without gaps."""
        places: dict[str, Place] = {}
        end = 0
        for name, dtype, shape, size in self._tensors():
            places[name] = Place(dtype, shape, end, end + size)
            end += size
        words = 2 + -(-end // BLOCK)
        places["checksums"] = Place("U32", (words,), end, end + 4 * words)
        return places

    def _tensors(self) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
        for column, dtype, size in _COLUMNS:
            for number, group in enumerate(self.groups):
                yield f"g{number}.{column}", dtype, (group.rows,), size * group.rows
        for number, group in enumerate(self.groups):
            for tap in group.taps:
                width = self.header.row_bytes(tap)
                yield tap_name(number, tap), "U8", (group.rows, width), width * group.rows
        yield "requests", "U8", (self.requests_bytes,), self.requests_bytes
        yield "metadata", "U8", (self.metadata_bytes,), self.metadata_bytes


def padding(nbytes: int) -> int:
    """Return the spaces after the metadata that align the checksums, given the bytes before."""
    return -nbytes % ALIGNMENT


def group_bytes(group: Group, header: Header) -> int:
    """Return the total length of a group's tensors in a shard with this header."""
    return group.rows * (_BYTES_PER_ROW + sum(map(header.row_bytes, group.taps)))


def tap_name(group: int, tap: Tap) -> str:
    return f"g{group}.{tap[0]}.{tap[1]}"


def tap_order(tap: Tap) -> tuple[int, int]:
    """Return the sort key of a tap: layer, then execution order of the sites within a layer."""
    return tap[1], _SITE_ORDER[tap[0]]


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# ---------------------------------------------------------------- reading


def header_length(first: bytes, size: int) -> int:
    """Return the header's length, given the file's first 8 bytes and its size."""
    length = int.from_bytes(first, "little")
    if len(first) < 8 or 8 + length > size:
        raise StoreError(f"truncated: {size} bytes, but the header alone takes {8 + length}")
    if not 2 <= length <= MAX_HEADER:
        raise StoreError(f"header of {length} bytes; the limit is {MAX_HEADER}")
    return length


def read_head(head: bytes, size: int) -> Layout:
    """Parse and check a shard's first bytes. Sizes that the header states allocate no memory."""
    try:
        described = read_json(head[8:])
    except SpecError as error:
        raise StoreError(f"the header is not JSON: {error}") from None
    if not isinstance(described, dict):
        raise StoreError("the header is not a JSON object")
    header, replaces = _read_about(described.get("__metadata__"))
    lengths = _rows(described, "requests"), _rows(described, "metadata")
    layout = Layout(header, _read_groups(described), *lengths, replaces)
    present = {tap for group in layout.groups for tap in group.taps}
    for tap, _ in header.widths:
        if tap not in present:
            raise StoreError(f"widths: {tap[0]}.{tap[1]} is no site and layer of the shard")
    places = layout.places()
    _check_tensors(described, places)
    if layout.head() != head:
        raise StoreError("the header is not in canonical form")
    wanted = len(head) + places["checksums"].stop
    if wanted != size:
        what = "truncated" if size < wanted else "too long"
        raise StoreError(f"{what}: expected {wanted} bytes according to the header, got {size}")
    return layout


def _read_about(about: object) -> tuple[Header, tuple[str, ...]]:
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise StoreError("a safetensors file, but not a shard of a midstream store")
    if about.get("version") not in (VERSION, WIDTHS_VERSION):
        raise StoreError(
            f"unsupported format version {_shown(about.get('version'))}; expected {VERSION} or "
            f"{WIDTHS_VERSION}"
        )
    if about.get("checksum") != CHECKSUM:
        raise StoreError(f"checksum: expected {CHECKSUM}, got {_shown(about.get('checksum'))}")
    texts: dict[str, Any] = {name: about.get(name) for name in _TEXTS}
    size = about.get("hidden_size")
    if not isinstance(size, str) or not size.isascii() or not size.isdigit() or len(size) > 9:
        raise StoreError(f"hidden_size: expected a number, got {_shown(size)}")
    header = Header(**texts, hidden_size=int(size), widths=_read_widths(about.get("widths")))
    replaces = about.get("replaces")
    names = replaces.split(" ") if isinstance(replaces, str) and replaces else []
    for name in names:
        if not is_shard_name(name):
            raise StoreError(f"replaces: {_shown(name)} is not a shard name")
    return header, tuple(names)


def _read_widths(text: object) -> tuple[tuple[Tap, int], ...]:
    """Return the widths of a header as `Header` takes them, which checks their numbers."""
    if text is None:
        return ()
    try:
        parsed = read_json(text) if isinstance(text, str) else None
    except SpecError as error:
        raise StoreError(f"widths: {error}") from None
    if not isinstance(parsed, dict):
        raise StoreError(f"widths: expected a JSON object as text, got {_shown(text)}")
    widths = []
    for name, width in parsed.items():
        match = _TAP.fullmatch(name)
        if match is None:
            raise StoreError(f"widths: expected names such as attn_out.1, got {show(name)}")
        widths.append(((match[1], int(match[2])), width))
    return tuple(widths)


def _read_groups(described: Mapping[str, Any]) -> tuple[Group, ...]:
    """Return the groups by the tensors' names; `_check_tensors` checks everything else."""
    rows: dict[int, int] = {}
    taps: dict[int, list[Tap]] = {}
    for name in described:
        match = _TENSOR.fullmatch(name)
        if match is None:
            continue
        number = int(match[1])
        if match[2] is None:
            rows[number] = _rows(described, name)
            continue
        tap = match[2], int(match[3])
        if tap[0] not in sites.NAMES or tap[1] > MAX_LAYER:
            raise StoreError(f"tensor {show(name)}: unknown site or layer")
        taps.setdefault(number, []).append(tap)
    if sorted(rows) != list(range(len(rows))) or set(rows) != set(taps):
        raise StoreError("groups are not numbered from 0, or a group has no taps or no index")
    return tuple(Group(tuple(sorted(taps[n], key=tap_order)), rows[n]) for n in range(len(rows)))


def _check_tensors(described: Mapping[str, Any], places: Mapping[str, Place]) -> None:
    """Raise StoreError for the first tensor that differs from the layout."""
    for name in described:
        if name != "__metadata__" and name not in places:
            raise StoreError(f"tensor {show(name)} is not part of the format")
    for name, place in places.items():
        got, wanted = described.get(name), place.entry()
        if got != wanted:
            raise StoreError(f"tensor {show(name)}: expected {wanted}, got {_shown(got)}")


def _rows(described: Mapping[str, Any], name: str) -> int:
    if name not in described:
        raise StoreError(f"missing tensor {show(name)}")
    tensor = described[name]
    shape = tensor.get("shape") if isinstance(tensor, dict) else None
    if not isinstance(shape, list) or len(shape) != 1 or not is_int(shape[0]):
        raise StoreError(f"tensor {show(name)}: expected one dimension, got {_shown(shape)}")
    rows = int(shape[0])
    if not 0 <= rows <= MAX_ROWS:
        raise StoreError(f"tensor {show(name)}: {show(rows)} rows; expected 0 to {MAX_ROWS}")
    return rows


def _shown(value: object) -> str:
    return "nothing" if value is None else show(value if isinstance(value, str) else repr(value))
