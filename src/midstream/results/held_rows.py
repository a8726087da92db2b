"""The encoded rows of one completion, with their positions and the request's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from midstream.results.arrays import Heads, array_of
from midstream.results.encoded_rows import Rows, rows_of
from midstream.results.gathered_rows import GatheredRows, RowGroup
from midstream.sites import Tap

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from midstream.codecs import Codec


@dataclass(slots=True, eq=False)
class HeldRows:
    """Encoded rows by (site, layer); those of `GatheredRows` are made when they are looked at.

    Attributes:
        values: [rows, width], or the encoded rows; of all heads.
        positions: int64 [rows], ascending.
        tokens: tokens of the whole request that were computed, from position 0.
    """

    values: Mapping[Tap, Tensor | Rows]
    positions: Mapping[Tap, Tensor]
    tokens: Tensor | Sequence[int]

    @property
    def token_ids(self) -> Tensor:
        """The tokens, int64."""
        if isinstance(self.tokens, Sequence):
            self.tokens = array_of(self.tokens, "int64")
        return self.tokens

    def token_array(self) -> NDArray[np.int64]:
        """Return the tokens as an array of NumPy."""
        return np.asarray(self.tokens, np.int64)

    @property
    def codec(self) -> Codec:
        """The codec that encoded the rows on the device."""
        if isinstance(self.values, GatheredRows) and self.values.groups:
            return self.values.groups[0].nothing.codec
        from midstream.codecs import Raw

        return next((rows.codec for rows in self.values.values() if isinstance(rows, Rows)), Raw())

    @property
    def owns_memory(self) -> bool:
        """Whether all rows are known to be in memory of this process alone."""
        return isinstance(self.values, GatheredRows) and self.values.owns_memory

    def rows(self, tap: Tap) -> Rows:
        """Return the encoded rows of a tap."""
        values = self.values[tap]
        return values if isinstance(values, Rows) else rows_of(values)

    def groups(self) -> tuple[RowGroup, ...]:
        """Return the encoded rows by the sites and layers that were captured together."""
        if isinstance(self.values, GatheredRows):
            return self.values.groups
        return tuple(_group_of(tap, self.rows(tap), self.positions[tap]) for tap in self.values)

    def counts(self) -> dict[Tap, int]:
        """Return the number of rows by (site, layer)."""
        if isinstance(self.values, GatheredRows):
            return self.values.counts()
        return {tap: positions.shape[0] for tap, positions in self.positions.items()}

    def copy(self) -> HeldRows:
        """Return the same in memory of their own."""
        rows = {tap: self.rows(tap).copy() for tap in self.values}
        positions = {tap: self.positions[tap].clone() for tap in self.values}
        return HeldRows(rows, positions, self.token_ids.clone())

    def alone(self) -> HeldRows:
        """Return what a pickle has: these rows, encoded, and no other memory."""
        values = {
            tap: rows.alone() if isinstance(rows, Rows) else rows
            for tap, rows in self.values.items()
        }
        return HeldRows(values, {**self.positions}, self.tokens)

    def decoded(self, tap: Tap, heads: Mapping[Tap, Heads]) -> Iterable[tuple[Tap, Tensor]]:
        """Return the rows of a tap, and of those that are decoded together with it."""
        mine = heads.get(tap)
        if isinstance(self.values, GatheredRows):
            from midstream.results.interleaved_rows import mark_interleaved

            group = self.values.group(tap)
            views = group.decoded()
            if views is not None and not heads:
                mark_interleaved(views)
                return zip(group.taps, views, strict=True)
            if views is not None:
                rows_by_tap = dict(zip(group.taps, views, strict=True))
                for head_tap in rows_by_tap.keys() & heads.keys():
                    rows_by_tap[head_tap] = heads[head_tap].of(rows_by_tap[head_tap])
                chosen = {key for key, tap_heads in heads.items() if tap_heads.chosen is not None}
                mark_interleaved([rows for key, rows in rows_by_tap.items() if key not in chosen])
                return rows_by_tap.items()
        rows = self.values[tap]
        if not isinstance(rows, Rows):
            return [(tap, rows if mine is None else mine.of(rows))]
        from midstream.results.interleaved_rows import interleaved

        found_rows = rows.decoded()
        return [(tap, interleaved(found_rows if mine is None else mine.of(found_rows)))]


@dataclass(frozen=True, slots=True)
class _OneTap:
    """Rows of one tap as a block; see `midstream.results.gathered_rows.Block`."""

    taps: tuple[Tap, ...]
    chunks: tuple[Tensor, ...]
    is_leased: bool = True  # not known


def _group_of(tap: Tap, rows: Rows, positions: Tensor) -> RowGroup:
    block = _OneTap((tap,), (rows.encoded()[:, None],))
    nothing = replace(rows, chunks=(), places=(), chosen=None)
    return RowGroup((tap,), positions, (block,), None, nothing)
