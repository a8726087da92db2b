"""Lazy selections: rows of many requests that are read in batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.errors import StoreError
from midstream.results.media_span import MediaSpan
from midstream.sites import Tap
from midstream.store.filter import Filter
from midstream.store.format.layout import tap_order
from midstream.store.format.lines import Line
from midstream.store.format.shard import Shard
from midstream.store.stored_activations import decode, media_of
from midstream.validation import is_int, kind, show


def as_selection(value: object) -> Selection:
    """Return a selection, of a store all its rows.

    Raises:
        StoreError: it is neither.
    """
    if isinstance(value, Selection):
        return value
    select = getattr(value, "select", None)
    if not callable(select):
        raise StoreError(
            f"selection: expected what open_store(folder).select(…) returns, got {kind(value)}"
        )
    selection: Selection = select()
    return selection


@dataclass(frozen=True, slots=True)
class SelectionSegment:
    """Rows of one tap in one group of a shard."""

    shard: Shard
    group: int
    tap: Tap
    rows: NDArray[np.int64]  # [n], indices in the group, ascending


class Selection:
    """Rows selected from a store, in a fixed order.

    The order is by layer and site, then by shard, then as stored. In a shard, the rows of one
    request are consecutive and ascend by position.

    `len()` is the number of rows; `batches` reads all, `take` some, if these are of one width.

    Attributes:
        taps: every (site, layer) that has rows, in order.
    """

    def __init__(self, shards: Sequence[Shard], chosen: Filter) -> None:
        self._segments = _segments(shards, chosen)
        self._ends = np.cumsum([len(segment.rows) for segment in self._segments], dtype=np.int64)
        self.taps = tuple(dict.fromkeys(segment.tap for segment in self._segments))
        _check_alike(self._segments)
        self._widths: dict[int, Tap] = {}  # a tap of each width
        for seg in self._segments:
            self._widths.setdefault(seg.shard.header.width(seg.tap), seg.tap)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def segments(self) -> tuple[SelectionSegment, ...]:
        """The segments with the rows, in order."""
        return tuple(self._segments)

    def __repr__(self) -> str:
        if not len(self):
            return "Selection(no rows)"
        header = self._segments[0].shard.header
        shards = len({segment.shard.name for segment in self._segments})
        widths = " or ".join(map(str, self._widths))
        return (
            f"Selection({len(self)} rows of {widths}, {header.codec}; "
            f"{len(self.taps)} taps, {shards} shards)"
        )

    def width(self) -> int:
        """Return the width of all vectors before encoding; 0 if there are no rows.

        Raises:
            StoreError: it is not the same for all taps.
        """
        if len(self._widths) > 1:
            taps = self._widths.items()
            shown = ", ".join(f"{width} at {site}.{layer}" for width, (site, layer) in taps)
            raise StoreError(
                f"the rows differ in width: {shown}; select those of one width by `site`, `layer` "
                "or `model`"
            )
        return next(iter(self._widths), 0)

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all rows in order, `size` at a time; the last batch may have fewer.

        Raises:
            StoreError: `size` is below 1, or the taps differ in width; during iteration, if rows
                are damaged.
        """
        self.width()
        if not is_int(size) or size < 1:
            got = show(int(size)) if is_int(size) else kind(size)
            raise StoreError(f"size: expected an `int` of at least 1, got {got}")
        starts = range(0, len(self), int(size))
        return (
            self.take(np.arange(first, min(first + starts.step, len(self)))) for first in starts
        )

    def take(self, indices: Sequence[int] | NDArray[np.integer[Any]] | Tensor) -> Batch:
        """Return rows by index, in the order of `indices`.

        Args:
            indices: [n], indices into this selection, from 0; in any order, duplicates allowed.

        Raises:
            IndexError: an index is negative or not below `len(self)`.
            StoreError: `indices` has other numbers than integers or is not one-dimensional, or the
                rows differ in width.
        """
        array: NDArray[Any] = np.asarray(indices)
        if array.ndim != 1:
            raise StoreError(f"indices: expected one dimension, got shape {list(array.shape)}")
        if array.dtype.kind not in "iu" and len(array):
            mask = "; of a mask take numpy.flatnonzero(mask)" if array.dtype.kind == "b" else ""
            raise StoreError(f"indices: expected integers, got {array.dtype}{mask}")
        wanted: NDArray[np.int64] = array.astype(np.int64)
        if len(wanted) and not 0 <= int(wanted.min()) <= int(wanted.max()) < len(self):
            raise IndexError(f"expected indices from 0 to {len(self) - 1}")
        numbers = np.searchsorted(self._ends, wanted, side="right")
        places = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[places])) + 1
        parts = []
        for where in np.split(places, cuts) if len(places) else []:
            number = int(numbers[where[0]])
            segment = self._segments[number]
            first = int(self._ends[number]) - len(segment.rows)
            parts.append(_Part(segment, segment.rows[wanted[where] - first], where))
        if len({part.segment.shard.header.width(part.segment.tap) for part in parts}) > 1:
            self.width()
        return Batch(parts, len(wanted))


@dataclass(frozen=True, slots=True)
class _Part:
    segment: SelectionSegment
    rows: NDArray[np.int64]  # [n], indices in its group
    where: NDArray[np.int64]  # [n], indices in the batch

    def encoded(self) -> NDArray[np.uint8]:
        """Return the encoded rows, uint8 [n, row_bytes]."""
        return self.segment.shard.gather(self.segment.group, self.segment.tap, self.rows)

    def stored(self, name: str) -> NDArray[Any]:
        """Return the rows of an index column; see `Shard.column`."""
        return self.segment.shard.column(self.segment.group, name)[self.rows]

    def requests(self) -> list[int]:
        """Return the index of each row's completion in its shard."""
        owners, bounds = self.segment.shard.owners(self.segment.group)
        indices: list[int] = owners[np.searchsorted(bounds, self.rows, side="right") - 1].tolist()
        return indices

    def lines(self) -> Iterator[Line]:
        """Yield the line of each row's completion."""
        return (self.segment.shard.lines[request] for request in self.requests())

    def media(self) -> Iterator[MediaSpan | None]:
        """Yield the item of the prompt that each row's token is of; None: it is text."""
        requests = self.requests()
        by_request = {index: media_of(self.segment.shard, index) for index in set(requests)}
        for place, index in zip(self.stored("position").tolist(), requests, strict=True):
            spans = by_request[index]
            yield next((s for s in spans if 0 <= place - s.first < s.length), None)


class Batch:
    """Some rows of a selection. Columns are read on first access and cached."""

    def __init__(self, parts: Sequence[_Part], count: int) -> None:
        self._parts = parts
        self._count = count

    def __len__(self) -> int:
        return self._count

    @cached_property
    def encoded(self) -> Tensor:
        """Encoded rows, uint8 [n, row_bytes]."""
        # NumPy allocates huge pages, torch does not, which makes this twice as fast.
        if len(self._parts) == 1:
            # A single part covers the batch in its order.
            return torch.from_numpy(self._parts[0].encoded())
        if not self._parts:
            return torch.zeros(0, 0, dtype=torch.uint8)
        segment = self._parts[0].segment
        width = segment.shard.header.row_bytes(segment.tap)
        rows = np.empty((self._count, width), np.uint8)
        for part in self._parts:
            first, last = int(part.where[0]), int(part.where[-1])
            together = last - first == len(part.where) - 1
            rows[slice(first, last + 1) if together else part.where] = part.encoded()
        return torch.from_numpy(rows)

    @cached_property
    def values(self) -> Tensor:
        """Decoded rows [n, width]: in the model's dtype for codec raw, else float32."""
        if not self._parts:
            return torch.zeros(0, 0)
        first = self._parts[0].segment
        try:
            return decode(first.shard, first.tap, self.encoded)
        except StoreError:
            # Decode part by part, so that the error names the shard.
            for part in self._parts:
                segment, where = part.segment, torch.from_numpy(part.where)
                decode(segment.shard, segment.tap, self.encoded[where])
            raise

    def numpy(self) -> NDArray[Any]:
        """Return `values` as an array; bfloat16, which NumPy lacks, becomes float32."""
        values = self.values
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()

    @cached_property
    def position(self) -> Tensor:
        """Position of each row's token in its request, int64 [n]."""
        return self._column(lambda part: part.stored("position"))

    @cached_property
    def token_id(self) -> Tensor:
        """Token id of each row, int64 [n]."""
        return self._column(lambda part: part.stored("token_id"))

    @cached_property
    def layer(self) -> Tensor:
        """Layer of each row, int64 [n]."""
        return self._column(lambda part: part.segment.tap[1])

    @cached_property
    def site(self) -> list[str]:
        """Site of each row."""
        return self._names(lambda part: itertools.repeat(part.segment.tap[0]))

    @cached_property
    def request(self) -> list[str]:
        """Request id of each row."""
        return self._names(lambda part: (line.request for line in part.lines()))

    @cached_property
    def tag(self) -> list[str]:
        """Tag of each row's request."""
        return self._names(lambda part: (line.tag for line in part.lines()))

    @cached_property
    def child(self) -> Tensor:
        """Completion index of each row in its request, int64 [n]."""
        return self._column(lambda part: [line.child for line in part.lines()])

    @cached_property
    def media(self) -> list[MediaSpan | None]:
        """The image, audio or video whose placeholder has each row's token; None: it has none."""
        spans: list[MediaSpan | None] = [None] * self._count
        for part in self._parts:
            for where, span in zip(part.where.tolist(), part.media(), strict=True):
                spans[where] = span
        return spans

    def __repr__(self) -> str:
        return f"Batch({self._count} rows)"

    def _column(self, of: Callable[[_Part], Any]) -> Tensor:
        column = np.empty(self._count, np.int64)
        for part in self._parts:
            column[part.where] = of(part)
        return torch.from_numpy(column)

    def _names(self, of: Callable[[_Part], Iterable[str]]) -> list[str]:
        names = [""] * self._count
        for part in self._parts:
            for where, name in zip(part.where.tolist(), of(part), strict=False):
                names[where] = name
        return names


def _segments(shards: Sequence[Shard], chosen: Filter) -> list[SelectionSegment]:
    segments: list[SelectionSegment] = []
    for shard in filter(chosen.has_shard, shards):
        wanted = chosen.requests_of(shard)
        for number, group in enumerate(shard.groups):
            taps = [tap for tap in group.taps if chosen.has_tap(tap)]
            if taps and len(rows := chosen.rows_of(shard, number, wanted)):
                segments.extend(SelectionSegment(shard, number, tap, rows) for tap in taps)
    # The sort is stable: within a tap, segments stay in the order of shards.
    return sorted(segments, key=lambda segment: tap_order(segment.tap))


def _check_alike(segments: Sequence[SelectionSegment]) -> None:
    headers = {segment.shard.header for segment in segments}
    kinds = {(header.codec, header.hidden_size, header.dtype): header.model for header in headers}
    if len(kinds) > 1:
        shown = sorted(kinds.items())
        every = "; ".join(f"{codec} of {size} {dtype} ({of})" for (codec, size, dtype), of in shown)
        raise StoreError(
            f"the rows differ in codec, width or dtype: {every}; select one kind by `model` or "
            "`codec`"
        )
