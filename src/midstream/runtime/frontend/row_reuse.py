"""Rows taken from earlier requests, decided on before a request is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstream.codecs import parse_codec
from midstream.errors import SpecError
from midstream.plan import Capture, Plan, ResolvedPlan
from midstream.plan.positions.ranges import Ranges, clip
from midstream.results.encoded_rows import Chunk, Scattered
from midstream.runtime.frontend.row_store import CHUNK, RowSet, RowStore
from midstream.runtime.protocol.cache_keys import CacheKeys, first_computed
from midstream.runtime.protocol.request_payload import ReusableRows
from midstream.runtime.protocol.results import ResultBlock
from midstream.runtime.protocol.runs import Ints, expand
from midstream.sites import Tap
from midstream.validation import at


class ReusedRows:
    """The rows of one request that may come from earlier ones, and its own for later ones."""

    def __init__(
        self,
        store: RowStore,
        plan: ResolvedPlan,
        captures: frozenset[int],
        keys: CacheKeys,
        origin: bytes,
        prompt: Sequence[int],
    ) -> None:
        """Create it; `captures`: those with `reuse`, at least one; `origin`: see `origin_of`."""
        self._store = store
        self._plan = plan
        self._captures = captures
        self._keys = keys
        self._origin = origin
        self._chain = self._chained([], prompt)
        self._taps = frozenset(tap for index in captures for tap in plan.captures[index].taps)
        # By taps and rank: the first position of each chunk, and the rows of these taps in it.
        self._found: dict[tuple[tuple[Tap, ...], int], list[tuple[int, RowSet]]] = {}
        self._kept: ReusableRows | None = None

    def find(self) -> ReusableRows:
        """Take the rows that the store has by now, once; return what the engine core must know."""
        if self._kept is not None:
            return self._kept
        resets = self._store.resets
        plan = self._plan
        prompt = len(self._chain) * CHUNK
        wanted = [
            (taps, _selected(plan, captures, prompt))
            for captures, taps in plan.alike
            if self._is_reused(captures)
        ]
        end = 0
        for key, start in zip(self._chain, range(0, prompt, CHUNK), strict=True):
            rows = self._rows_of(key, start, wanted)
            if rows is None:
                break
            for row_set, taps in rows:
                self._found.setdefault((taps, row_set.rank), []).append((start, row_set))
            end = start + CHUNK
        self._store.use(self._chain)
        firsts = [
            _first(plan.captures[index].returned, end if self._is_reused(captures) else 0)
            for captures, _ in plan.alike
            for index in captures
        ]
        firsts += first_computed(plan)
        known = [first for first in firsts if first is not None]
        self._kept = ReusableRows(resets, min(known, default=None))
        return self._kept

    def _is_reused(self, captures: Sequence[int]) -> bool:
        """Return whether rows of taps that are selected by these captures may be reused."""
        return self._captures.issuperset(captures)

    def _rows_of(
        self, key: bytes, start: int, wanted: Sequence[tuple[Sequence[Tap], Ints]]
    ) -> list[tuple[RowSet, tuple[Tap, ...]]] | None:
        """Return the rows of a chunk, with the taps to read from them; None if one is missing."""
        row_sets = []
        for taps, positions in wanted:
            offsets = _bits(positions, start)
            if offsets:
                mine = self._store.find(key, taps, offsets, self._plan.codec)
                if mine is None:
                    return None
                row_sets += mine
        return row_sets

    def missing(self, blocks: Sequence[ResultBlock], tokens: Sequence[int]) -> list[ResultBlock]:
        """Return the rows that a completion has from earlier requests, beside its own `blocks`."""
        missing_blocks = []
        for captures, taps in self._plan.alike:
            if not self._is_reused(captures):
                continue
            selected = expand(self._plan.ranges_of(captures, len(tokens), tokens))
            together: dict[tuple[int, ...], list[Tap]] = {}
            for tap in taps:
                there = tuple([index for index, block in enumerate(blocks) if tap in block.taps])
                together.setdefault(there, []).append(tap)
            for there, mine in together.items():
                computed = [np.zeros(0, np.int64), *(blocks[index].positions for index in there)]
                missing_blocks += self._blocks(
                    mine, np.setdiff1d(selected, np.concatenate(computed))
                )
        return missing_blocks

    def _blocks(self, taps: Sequence[Tap], positions: Ints) -> list[ResultBlock]:
        blocks = []
        for (there, rank), sets in self._found.items():
            mine = [tap for tap in taps if tap in there]
            known: list[Ints] = []
            chunks: list[Chunk] = []
            for start, row_set in sets if mine else ():
                at = _positions(row_set.offsets, start)
                chosen = np.flatnonzero(np.isin(at, positions))
                if chosen.size:
                    known.append(at[chosen])
                    rows = row_set.rows[torch.from_numpy(chosen)]
                    places = [row_set.taps.index(tap) for tap in mine]
                    chunks.append(rows if tuple(mine) == row_set.taps else rows[:, places])
            if known:
                codec = parse_codec(self._plan.codec)
                blocks.append(ResultBlock(mine, codec, np.concatenate(known), chunks, rank))
        return blocks

    def keep(self, blocks: Sequence[ResultBlock], tokens: Sequence[int], resets: int) -> None:
        """Keep the rows of a completion without problems for later requests. `resets` of the prefix
        cache were the same for all rows: the model may have changed at each.
        """
        self._store.see(resets)
        chain = self._chained(self._chain, tokens)
        mine = [_BlockRows(block, self._taps, len(chain)) for block in blocks]
        # Where room is short, the first tokens stay: without them later ones are of no use.
        for chunk, key in reversed(list(enumerate(chain))):
            for block_rows in mine:
                offsets = block_rows.offsets(chunk)
                if offsets and not self._store.has(key, block_rows.taps, offsets, self._plan.codec):
                    rows = block_rows.rows(chunk)
                    row_set = RowSet(
                        block_rows.taps, self._plan.codec, offsets, rows, block_rows.rank
                    )
                    self._store.add(key, row_set, resets)
        self._store.use(chain)

    def _chained(self, known: Sequence[bytes], tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the full chunks of tokens, of which the first ones are known."""
        chain = list(known)
        for start in range(len(chain) * CHUNK, len(tokens) - CHUNK + 1, CHUNK):
            before = chain[-1] if chain else self._origin
            ids = np.array(tokens[start : start + CHUNK], np.int64).tobytes()
            mark = self._keys.of_block(start, start + CHUNK) or ""
            chain.append(hashlib.sha256(before + ids + mark.encode()).digest())
        return chain


class _BlockRows:
    def __init__(self, block: ResultBlock, wanted: frozenset[Tap], chunks: int) -> None:
        self.taps = tuple(tap for tap in block.taps if tap in wanted)
        self.rank = block.rank
        self._positions = block.positions
        is_all = len(self.taps) == len(block.taps)
        places = [block.taps.index(tap) for tap in self.taps]
        self._chosen = slice(None) if is_all else torch.tensor(places)
        pieces = block.chunks if self.taps else []
        self._pieces = [
            piece.records() if isinstance(piece, Scattered) else piece for piece in pieces
        ]
        self._bounds = np.cumsum([0, *(len(piece) for piece in self._pieces)])
        cuts = np.searchsorted(block.positions, np.arange(chunks + 1) * CHUNK)
        self._spans = list(pairwise(cuts.tolist()))

    def offsets(self, chunk: int) -> int:
        """Return at which offsets of a chunk there are rows, as a bit for each."""
        begin, end = self._spans[chunk]
        return _bits(self._positions[begin:end], chunk * CHUNK) if self._pieces else 0

    def rows(self, chunk: int) -> Tensor:
        """Return a copy of the rows of a chunk, uint8 [positions, taps, bytes of a row]."""
        begin, end = self._spans[chunk]
        first = int(np.searchsorted(self._bounds, begin, side="right")) - 1
        parts = []
        for piece, start in zip(self._pieces[first:], self._bounds[first:].tolist(), strict=False):
            if start >= end:
                break
            parts.append(piece[max(0, begin - start) : end - start][:, self._chosen])
        return torch.cat(parts)


class RowReuse:
    """Rows of one engine's earlier requests, and which requests may have them."""

    def __init__(
        self, max_bytes: int, has_prefix_cache: bool, pace: Callable[[str], object]
    ) -> None:
        """Create it; `pace` returns how often a sink gets rows of running requests, if it does."""
        self._store = RowStore(max_bytes)
        self._max_bytes = max_bytes
        self._has_prefix_cache = has_prefix_cache
        self._pace = pace

    def rows_of(
        self,
        request: Any,
        plan: ResolvedPlan,
        keys: CacheKeys,
        own: Plan | None,
        also: Sequence[Capture],
    ) -> ReusedRows | None:
        """Return the rows that a request may have from earlier ones; None: all are computed."""
        own_captures = () if own is None else own.captures
        captures = frozenset(
            index
            for index, capture in enumerate(plan.captures)
            if (also[capture.source] if capture.source < 0 else own_captures[capture.source]).reuse
        )
        for index in captures:
            source = plan.captures[index].source
            written = also[source] if source < 0 else own.captures[source] if own else None
            with at(f"capture[{source}].reuse" if source >= 0 else f"sinks[{source}].reuse"):
                self._check("" if written is None else written.sink)
        if not captures or getattr(request, "resumable", False):
            return None
        origin = origin_of(request)
        if origin is None:
            return None
        if own is not None and any(capture.stream for capture in own.captures):
            raise SpecError("capture", "some captures have `stream` and others `reuse`; omit one")
        return ReusedRows(self._store, plan, captures, keys, origin, request.prompt_token_ids)

    def _check(self, sink: str) -> None:
        if not self._max_bytes:
            problem = "this engine keeps no rows: start it with midstream's setting reuse_bytes"
            raise SpecError("", problem)
        if not self._has_prefix_cache:
            raise SpecError("", "this engine has no prefix cache, so that every row is computed")
        if self._pace(sink) is not None:
            raise SpecError("", f"the sink {sink} gets rows while the request runs; omit `reuse`")


def origin_of(request: Any) -> bytes | None:
    """Return what the rows of a request depend on besides its tokens and edits, as a hash; None if
    its tokens do not tell its prompt. Requests with different cache salts share no rows, as no KV.
    """
    if not request.prompt_token_ids or request.prompt_embeds is not None or request.mm_features:
        return None
    adapter = request.lora_request
    names = ("lora_name", "lora_int_id", "lora_path")
    adapter_key = None if adapter is None else [getattr(adapter, name, None) for name in names]
    return hashlib.sha256(json.dumps([adapter_key, request.cache_salt]).encode()).digest()


def _selected(plan: ResolvedPlan, captures: Sequence[int], length: int) -> Ints:
    """Return the positions below `length` that any of some captures may select."""
    positions = [expand(clip(plan.captures[index].where.possible, length)) for index in captures]
    return np.unique(np.concatenate(positions))


def _first(ranges: Ranges, least: int) -> int | None:
    """Return the first position from `least` on; None if there is none."""
    stops = (max(start, least) for start, stop in ranges if stop is None or stop > least)
    return next(stops, None)


def _bits(positions: Ints, start: int) -> int:
    """Return which positions of the chunk at `start` are among some, as a bit for each."""
    mine = positions[(positions >= start) & (positions < start + CHUNK)] - start
    return int(np.bitwise_or.reduce(np.int64(1) << mine)) if mine.size else 0


def _positions(offsets: int, start: int) -> Ints:
    """Return the positions of a chunk whose bits are set, ascending."""
    return np.array([start + offset for offset in range(CHUNK) if offsets >> offset & 1], np.int64)
