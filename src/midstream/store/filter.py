"""Row filters of `Store.select`: by request, tap and header, and by position and token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream import sites
from midstream.errors import StoreError
from midstream.plan import Positions, Span, TokenIds, Window
from midstream.plan.positions.items import IN_PROMPT, Between, Item, show_item
from midstream.sites import Tap
from midstream.store.format.shard import Shard
from midstream.validation import INT_LIMIT, hint, is_int, kind, show

# The values that occur in a shard, per filter that is checked against the store.
_VALUES: dict[str, Callable[[Shard], Iterable[Any]]] = {
    "site": lambda shard: (site for group in shard.groups for site, _ in group.taps),
    "layer": lambda shard: (layer for group in shard.groups for _, layer in group.taps),
    "request": lambda shard: (line.request for line in shard.lines),
    "child": lambda shard: (line.child for line in shard.lines),
    "tag": lambda shard: (line.tag for line in shard.lines),
    "model": lambda shard: (shard.header.model,),
    "codec": lambda shard: (shard.header.codec,),
}
_LISTS = (list, tuple, set, frozenset, np.ndarray)
_Ints = NDArray[np.int64]
_Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Rows to select; a field that is None matches all rows. Names occur in the store."""

    wanted: Mapping[str, frozenset[Any]]  # by argument of `Store.select`; missing: all rows match
    positions: Positions | None
    tokens: _Ints | range | None

    def _fits(self, name: str, value: object) -> bool:
        return name not in self.wanted or value in self.wanted[name]

    def has_shard(self, shard: Shard) -> bool:
        return self._fits("model", shard.header.model) and self._fits("codec", shard.header.codec)

    def has_tap(self, tap: Tap) -> bool:
        return self._fits("site", tap[0]) and self._fits("layer", tap[1])

    def requests_of(self, shard: Shard) -> _Mask:
        """Return bool [requests]: the requests whose rows may match."""
        if self.wanted.keys().isdisjoint(("request", "child", "tag")):
            return np.ones(len(shard.lines), np.bool_)
        fits = (
            self._fits("request", line.request)
            and self._fits("child", line.child)
            and self._fits("tag", line.tag)
            for line in shard.lines
        )
        return np.fromiter(fits, np.bool_, len(shard.lines))

    def rows_of(self, shard: Shard, group: int, wanted: _Mask) -> _Ints:
        """Return the matching rows of a group, int64, ascending; `wanted`: of `requests_of`."""
        owners, bounds = shard.owners(group)
        chosen = wanted[owners]
        counts = np.diff(bounds)[chosen]
        # The first row of each run, minus the number of selected rows before the run.
        shift = bounds[:-1][chosen] - (np.cumsum(counts) - counts)
        rows: _Ints = np.arange(counts.sum()) + np.repeat(shift, counts)
        if len(rows) and (self.positions is not None or self.tokens is not None):
            prompts = np.array([line.prompt_tokens for line in shard.lines], np.int64)
            lengths = np.repeat(prompts[owners[chosen]], counts)
            keep = np.ones(len(rows), np.bool_)
            tokens = shard.column(group, "token_id")[rows]
            if self.positions is not None:
                positions = shard.column(group, "position")[rows]
                keep &= _matches(self.positions, positions, lengths, tokens)
            if self.tokens is not None:
                keep &= _are_in(tokens, self.tokens)
            rows = rows[keep]
        return rows


def read_filter(shards: Sequence[Shard], arguments: Mapping[str, object]) -> Filter:
    # Values are collected only for filters that are given: there may be millions of requests.
    wanted = {
        name: _read(name, arguments[name], {value for shard in shards for value in names(shard)})
        for name, names in _VALUES.items()
        if arguments[name] is not None
    }
    position, token = arguments["position"], arguments["token"]
    positions = None if position is None else _read_positions(position)
    tokens = None if token is None else _read_tokens(token)
    return Filter(wanted=wanted, positions=positions, tokens=tokens)


def _read(name: str, value: object, known: Collection[Any]) -> frozenset[Any]:
    is_number = name in ("layer", "child")
    wanted: list[Any] = _numbers(name, value, known) if is_number else _words(name, value)
    if name == "site":
        wanted = [sites.canonical(site) or site for site in wanted]
    requested = frozenset(wanted)
    if missing := requested - set(known):
        first = min(missing)
        shown = ", ".join(map(repr, sorted(known)[:8]))
        more = f", … ({len(known)} in total)" if len(known) > 8 else ""
        present = f"; known: {shown}{more}" if known else ": the store is empty"
        close = hint(first, known) if isinstance(first, str) else ""
        raise StoreError(f"{name}: no rows in this store have {show(first)}{close}{present}")
    return requested


def _words(name: str, value: object) -> list[str]:
    words = []
    for word in list(value) if isinstance(value, _LISTS) else [value]:
        if not isinstance(word, str):
            raise StoreError(f"{name}: expected `str` or a list of them, got {kind(word)}")
        words.append(str(word))
    return words


def _numbers(name: str, value: object, known: Collection[int]) -> list[int]:
    """Return the ints as given; for a range or slice, the known numbers in it."""
    if isinstance(value, slice):
        bounds = [bound for bound in (value.start, value.stop) if bound is not None]
        if any(not is_int(bound) or bound < 0 for bound in bounds):
            raise StoreError(f"{name}: expected a slice with bounds from 0, got {value}")
        if value.step is not None and (not is_int(value.step) or not value.step):
            raise StoreError(f"{name}: expected a slice with a step other than 0, got {value}")
        value = range(max(known, default=0) + 1)[value]
    if isinstance(value, range):
        return [number for number in known if number in value]
    return _ints(name, value)


def _read_tokens(value: object) -> _Ints | range:
    if isinstance(value, range):
        _ints("token", [value.start, value.stop])
        return value
    return np.array(_ints("token", value), np.int64)


def _ints(name: str, value: object) -> list[int]:
    numbers = []
    for number in list(value) if isinstance(value, _LISTS) else [value]:
        if not is_int(number) or abs(int(number)) > INT_LIMIT:
            got = kind(number) if not is_int(number) else show(int(number))
            raise StoreError(
                f"{name}: expected `int` within ±2**31, or a list or range of them, got {got}"
            )
        numbers.append(int(number))
    return numbers


def _read_positions(value: object) -> Positions:
    positions = Positions.parse(value)
    for item in (*positions.include, *positions.exclude):
        if isinstance(item, (*IN_PROMPT, Between)) or item == "last_row":
            raise StoreError(
                f"position: {show_item(item)} cannot be determined for stored rows; capture these "
                "positions separately under a tag"
            )
    return positions


def _matches(positions: Positions, places: _Ints, prompts: _Ints, tokens: _Ints) -> _Mask:
    """Return bool [n]: the matching rows, given position, prompt length and token of each."""
    mask = np.zeros(len(places), np.bool_)
    for item in positions.include:
        mask |= _item_matches(item, places, prompts, tokens)
    for item in positions.exclude:
        mask &= ~_item_matches(item, places, prompts, tokens)
    if positions.phase != "all":
        mask &= (places < prompts) == (positions.phase == "prompt")
    return mask


def _item_matches(item: Item, places: _Ints, prompts: _Ints, tokens: _Ints) -> _Mask:
    if isinstance(item, TokenIds):
        return np.isin(tokens, item.ids)
    if isinstance(item, (Span, Window)):
        mask = np.zeros(len(places), np.bool_)
        # Prompts of equal length have the same bounds.
        for length in np.unique(prompts).tolist():
            start, stop = item.bounds(length)
            within = (prompts == length) & (places >= start) & ((places - start) % item.step == 0)
            mask |= within if stop is None else within & (places < stop)
        return mask
    if item == "all":
        return np.ones(len(places), np.bool_)
    if item == "prompt":
        return np.less(places, prompts)
    if item == "generated":
        return np.greater_equal(places, prompts)
    number = -1 if item == "last_prompt" else item
    assert isinstance(number, int)
    return np.equal(places, number if number >= 0 else prompts + number)


def _are_in(values: _Ints, wanted: _Ints | range) -> _Mask:
    if isinstance(wanted, range):
        if not wanted:
            return np.zeros(len(values), np.bool_)
        low, high = sorted((wanted[0], wanted[-1]))
        mask = (values >= low) & (values <= high) & ((values - low) % wanted.step == 0)
        return np.asarray(mask, np.bool_)
    return np.isin(values, wanted)
