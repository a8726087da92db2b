"""Tokens of a selection with the rows of several taps, which are read together."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from midstream import sites
from midstream.errors import StoreError
from midstream.sites import Tap
from midstream.store.format.entry_rows import check_positions
from midstream.store.format.layout import MAX_POSITION
from midstream.store.format.shard import Shard
from midstream.store.row_places import RowPlaces
from midstream.store.selection import Selection, SelectionSegment
from midstream.store.stored_activations import decode
from midstream.validation import kind, listed, show

_Ints = NDArray[np.int64]
_Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSegment:
    """Tokens of a shard whose rows of each tap are in one group."""

    shard: Shard
    taps: tuple[Tap, ...]
    groups: tuple[int, ...]  # of each tap
    rows: tuple[_Ints, ...]  # of each tap: [n], indices in its group
    first: int  # index in the selection of the first tap's segment
    picks: _Ints | None  # [n], the tokens' rows in that segment; None: all

    def __len__(self) -> int:
        return len(self.rows[0])

    def column(self, name: str, at: _Ints | slice = slice(None)) -> _Ints:
        """Return the tokens' "position", "token_id" or "request"."""
        column = self.shard.column(self.groups[0], name)
        return column[self.rows[0][at]].astype(np.int64)

    def index(self, at: _Ints) -> _Ints:
        """Return the indices in the selection of the rows of the first tap."""
        return self.first + (at if self.picks is None else self.picks[at])

    def only(self, keep: _Ints) -> TokenSegment:
        """Return the segment with some of its tokens."""
        kept: dict[int, _Ints] = {}  # taps of a group share their rows
        rows = tuple(kept.setdefault(id(rows), rows[keep]) for rows in self.rows)
        return replace(self, rows=rows, picks=keep if self.picks is None else self.picks[keep])


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Tokens of one segment, and where they are in a batch."""

    segment: TokenSegment
    at: _Ints  # [n], indices in the segment
    where: _Ints | slice  # [n], places in the batch


class Tokens:
    """Tokens with a row of each of some taps. `join` None: each row is a token of its own."""

    def __init__(self, selection: Selection, join: object) -> None:
        self.taps = None if join is None else join_taps(join, selection)
        self.skipped = 0  # tokens of the selection with rows of some of the taps, but not of all
        # Completions that have such: a shard's name, the request's index in the shard.
        self.partial: set[tuple[str, int]] = set()
        if self.taps is None:
            selection.width()
            segments = list(_each_row(selection))
        else:
            segments = [
                part for shard in _by_shard(selection, self.taps) for part in self._of(shard)
            ]
            _check_widths(segments)
            if not segments and self.skipped:
                raise StoreError(
                    f"join: none of {self.skipped} tokens has rows at all of "
                    f"{listed([tap_key(tap) for tap in self.taps])}"
                )
        self._take(segments)

    def _take(self, segments: Sequence[TokenSegment]) -> None:
        self.segments = tuple(segments)
        self.ends = np.cumsum([len(segment) for segment in segments], dtype=np.int64)
        sizes = {segment.shard.name: segment.shard.size for segment in segments}
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._is_large = sum(sizes.values()) > memory // 2  # it may not stay in the page cache

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def drop_first(self) -> None:
        """Leave out the first token of each prompt."""
        kept = []
        for segment in self.segments:
            keep = np.flatnonzero(segment.column("position"))
            if len(keep):
                kept.append(segment if len(keep) == len(segment) else segment.only(keep))
        self._take(kept)

    @property
    def is_mapped(self) -> bool:
        """Whether the shards are; all are of one store."""
        return self.segments[0].shard.is_mapped

    def parts(self, tokens: _Ints) -> Iterator[TokenPart]:
        """Divide ascending tokens by segment."""
        numbers = np.searchsorted(self.ends, tokens, side="right")
        cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
        for first, last in itertools.pairwise([0, *cuts, len(tokens)]):
            number = int(numbers[first])
            segment = self.segments[number]
            at = tokens[first:last] - (int(self.ends[number]) - len(segment))
            yield TokenPart(segment, at, slice(first, last))

    def bundles(self) -> list[slice]:
        """Return the taps that are read into one array: all, or each if the widths differ."""
        taps = self.segments[0].taps
        header = self.segments[0].shard.header
        if len({header.width(tap) for tap in taps}) == 1:
            return [slice(0, len(taps))]
        return [slice(number, number + 1) for number in range(len(taps))]

    def width(self, bundle: slice) -> tuple[int, int]:
        """Return (number of taps, bytes of a row) of a bundle."""
        segment = self.segments[0]
        taps = segment.taps[bundle]
        return len(taps), segment.shard.header.row_bytes(taps[0])

    def locate(self, parts: Iterable[TokenPart], bundle: slice, count: int) -> RowPlaces:
        """Return where the rows of a bundle's taps are, of `count` places in a mapped store.

        Places of no part have the rows of the first part's first token.
        """
        files, addresses = [], None
        for part in parts:
            segment = part.segment
            taps = list(zip(segment.groups[bundle], segment.taps[bundle], strict=True))
            rows = [rows[part.at] for rows in segment.rows[bundle]]
            file, starts = segment.shard.locate(taps, rows)
            assert file.address is not None
            starts += file.address
            if addresses is None:
                addresses = np.tile(starts[0], (count, 1))
            addresses[part.where] = starts
            files.append(file)
        assert addresses is not None
        return RowPlaces(files, addresses)

    def fetch(self, parts: Iterable[TokenPart], bundle: slice, data: _Bytes, checked: bool) -> None:
        """Copy the rows of a bundle's taps, of a store that is not mapped, to their places in
        uint8 [n, taps, row_bytes].
        """
        for part in parts:
            segment = part.segment
            taps = zip(segment.groups, segment.taps, segment.rows, strict=True)
            for number, (group, tap, rows) in enumerate(list(taps)[bundle]):
                data[part.where, number] = segment.shard.gather(group, tap, rows[part.at], checked)

    def decode(self, bundle: slice, data: Tensor) -> Tensor:
        """Decode the rows of a bundle, uint8 [n, taps, row_bytes], to [n, taps, width]."""
        segment = self.segments[0]
        values = decode(segment.shard, segment.taps[bundle][0], data.flatten(0, 1))
        return values.view(*data.shape[:2], -1)

    def named(self, values: Sequence[Tensor]) -> Tensor | dict[str, Tensor]:
        """Return the values of the bundles as a batch has them."""
        if self.taps is None:
            return values[0].squeeze(-2)
        if len(values) == 1:
            return values[0]
        of_tap = zip(self.taps, values, strict=True)
        return {tap_key(tap): value.squeeze(-2) for tap, value in of_tap}

    def prepare(self, parts: Iterable[TokenPart], checked: bool) -> None:
        """Have the system read rows, ascending in a part, and compare them with their checksums."""
        for part in parts:
            segment = part.segment
            for group, tap, rows in zip(segment.groups, segment.taps, segment.rows, strict=True):
                segment.shard.prepare(group, tap, rows[part.at], checked, self._is_large)

    def _of(self, shard: list[dict[int, tuple[SelectionSegment, int]]]) -> Iterator[TokenSegment]:
        """Yield the segments of a shard, given the segments of each tap by group."""
        assert self.taps
        together = sorted(set.intersection(*map(set, shard)))
        for group in together:
            segment, first = shard[0][group]
            count = len(self.taps)
            yield TokenSegment(
                shard=segment.shard,
                taps=self.taps,
                groups=(group,) * count,
                rows=(segment.rows,) * count,
                first=first,
                picks=None,
            )
        others = [
            _Keys.of([by_group[group] for group in sorted(set(by_group) - set(together))])
            for by_group in shard
        ]
        if not any(len(keys.keys) for keys in others):
            return
        common: _Ints = reduce(np.intersect1d, [keys.keys for keys in others])
        every: _Ints = reduce(np.union1d, [keys.keys for keys in others])
        lacking = np.setdiff1d(every, common, assume_unique=True)
        self.skipped += len(lacking)
        name = next(keys.shard.name for keys in others if keys.shard)
        requests = np.unique(lacking // (MAX_POSITION + 1)).tolist()
        self.partial.update((name, request) for request in requests)
        if len(common):
            yield from _joined(self.taps, others, common)


@dataclass(frozen=True, slots=True)
class _Keys:
    """The rows of a tap in a shard, in the order of request and position."""

    shard: Shard | None
    keys: _Ints  # [n], request · 2²⁶ + position, ascending
    groups: _Ints  # [n]
    rows: _Ints  # [n], in the group
    index: _Ints  # [n], in the selection

    @staticmethod
    def of(segments: Sequence[tuple[SelectionSegment, int]]) -> _Keys:
        nothing = np.empty(0, np.int64)
        columns: list[tuple[_Ints, ...]] = [(nothing,) * 4]
        shard = None
        for segment, first in segments:
            shard, rows = segment.shard, segment.rows
            positions = shard.column(segment.group, "position")[rows]
            requests = shard.column(segment.group, "request")[rows].astype(np.int64)
            if len(positions):
                check_positions(np.unique(positions), str(shard.path))
            keys = requests * (MAX_POSITION + 1) + positions
            index = np.arange(first, first + len(rows))
            columns.append((keys, np.full(len(rows), segment.group), rows, index))
        keys, groups, rows, index = (
            np.concatenate(column) for column in zip(*columns, strict=True)
        )
        order = np.argsort(keys, kind="stable")
        if (np.diff(keys[order]) == 0).any():
            assert shard
            raise StoreError(f"{shard.path}: a request has two rows of a tap at a position")
        return _Keys(shard, keys[order], groups[order], rows[order], index[order])


def _joined(taps: tuple[Tap, ...], keys: Sequence[_Keys], common: _Ints) -> Iterator[TokenSegment]:
    """Yield the segments of tokens whose taps are in several groups."""
    at = [np.searchsorted(tap_keys.keys, common) for tap_keys in keys]
    groups = np.stack(
        [tap_keys.groups[where] for tap_keys, where in zip(keys, at, strict=True)], axis=1
    )
    combinations, numbers = np.unique(groups, axis=0, return_inverse=True)
    shard = keys[0].shard
    assert shard
    for number, combination in enumerate(combinations.tolist()):
        chosen = np.flatnonzero(numbers.reshape(-1) == number)
        yield TokenSegment(
            shard=shard,
            taps=taps,
            groups=tuple(combination),
            rows=tuple(
                tap_keys.rows[where[chosen]] for tap_keys, where in zip(keys, at, strict=True)
            ),
            first=0,
            picks=keys[0].index[at[0][chosen]],
        )


def _each_row(selection: Selection) -> Iterator[TokenSegment]:
    first = 0
    for segment in selection.segments:
        yield TokenSegment(
            shard=segment.shard,
            taps=(segment.tap,),
            groups=(segment.group,),
            rows=(segment.rows,),
            first=first,
            picks=None,
        )
        first += len(segment.rows)


def _by_shard(
    selection: Selection, taps: tuple[Tap, ...]
) -> Iterator[list[dict[int, tuple[SelectionSegment, int]]]]:
    """Yield for each shard, and for each tap: its segments and their first index, by group."""
    shards: dict[str, list[dict[int, tuple[SelectionSegment, int]]]] = {}
    numbers = {tap: number for number, tap in enumerate(taps)}
    first = 0
    for segment in selection.segments:
        if segment.tap in numbers:
            of_shard = shards.setdefault(segment.shard.name, [{} for _ in taps])
            of_shard[numbers[segment.tap]][segment.group] = segment, first
        first += len(segment.rows)
    for name in sorted(shards):
        yield shards[name]


def _check_widths(segments: Sequence[TokenSegment]) -> None:
    widths: dict[Tap, int] = {}
    for segment in segments:
        for tap in segment.taps:
            width = segment.shard.header.width(tap)
            if widths.setdefault(tap, width) != width:
                raise StoreError(
                    f"the rows of {tap_key(tap)} differ in width: {widths[tap]} and {width}; "
                    "select those of one width by `model`"
                )


def join_taps(value: object, selection: Selection) -> tuple[Tap, ...]:
    """Return the taps of `join`: pairs of site and layer, or names such as `resid_post.2`,
    `final_norm`.
    """
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        got = show(value) if isinstance(value, str) else kind(value)
        raise StoreError(f'join: expected a list such as [("resid_post", 2)], got {got}')
    taps = []
    for item in value:
        tap = _read_tap(item, selection)
        if tap not in selection.taps:
            present = ", ".join(tap_key(known) for known in selection.taps[:8])
            more = f", … ({len(selection.taps)} in total)" if len(selection.taps) > 8 else ""
            raise StoreError(f"join: no rows of {tap_key(tap)}; the selection has {present}{more}")
        if tap in taps:
            raise StoreError(f"join: {tap_key(tap)} is listed twice")
        taps.append(tap)
    return tuple(taps)


def _read_tap(item: object, selection: Selection) -> Tap:
    named = sites.parse(item) if isinstance(item, str) else None
    if named and named[0] in sites.ENDS:
        named = next((tap for tap in selection.taps if tap[0] == named[0]), named)
    if isinstance(item, (tuple, list)) and len(item) == 2 and isinstance(item[0], str):
        site, layer = sites.canonical(item[0]), item[1]
        named = (site, layer) if site and type(layer) is int else None
    if named is None or named[1] is None:
        raise StoreError(
            f'join: expected pairs of site and layer, as ("resid_post", 2), got {show(repr(item))}'
        )
    return named[0], named[1]


def tap_key(tap: Tap) -> str:
    """Return a tap's name in a batch, `resid_post.2`."""
    return f"{tap[0]}.{tap[1]}"
