"""Captured rows of one completion by site and layer, in the blocks that the workers sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from midstream.results.encoded_rows import Chunk, Rows, Scattered
from midstream.sites import Tap

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class Block(Protocol):
    """Rows of some taps at the same positions."""

    @property
    def taps(self) -> Sequence[Tap]:
        """The taps, in the order within a record."""
        ...

    @property
    def chunks(self) -> Sequence[Chunk]:
        """[positions, taps, bytes of a row] each, one after the other."""
        ...

    @property
    def is_leased(self) -> bool:
        """Whether the chunks are in a worker's memory, which they keep in use."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RowGroup:
    """Rows of taps that were captured at the same positions.

    Attributes:
        taps: the taps.
        positions: int64 [rows], ascending.
        blocks: the blocks that have these rows.
        chosen: int64 [rows], indices into the blocks' rows; None: all rows in their order.
        nothing: encoded rows of the same codec, width and dtype, without any.
    """

    taps: tuple[Tap, ...]
    positions: Tensor
    blocks: Sequence[Block]
    chosen: Tensor | None
    nothing: Rows

    def rows_of(self, tap: Tap) -> Rows:
        """Return the rows of one tap."""
        chunks: list[Chunk] = []
        places: list[int] = []
        for block in self.blocks:
            chunks += block.chunks
            places += [block.taps.index(tap)] * len(block.chunks)
        nothing = self.nothing
        return Rows(
            nothing.codec,
            nothing.hidden,
            nothing.dtype,
            tuple(chunks),
            tuple(places),
            self.chosen,
        )

    def decoded(self) -> dict[Tap, Tensor] | None:
        """Return the decoded rows of all taps, [rows, hidden] each, as views of one tensor; None if
        they are not raw rows in one piece of memory.
        """
        from midstream.codecs.base import view_as

        nothing = self.nothing
        pieces = [(block.taps, chunk) for block in self.blocks for chunk in block.chunks]
        if self.chosen is not None or len(pieces) != 1 or nothing.codec.spec != "raw":
            return None
        ((taps, chunk),) = pieces
        width = nothing.hidden * nothing.dtype.itemsize
        if isinstance(chunk, Scattered) or chunk.shape[1:] != (len(taps), width):
            return None
        # A block may have taps of other groups too.
        every = dict(zip(taps, view_as(chunk, nothing.dtype).unbind(1), strict=True))
        return every if taps == self.taps else {tap: every[tap] for tap in self.taps}

    def encoded(self) -> NDArray[np.uint8]:
        """Return the encoded rows of all taps, uint8 [taps, rows, bytes of a row].

        The number of NumPy calls does not depend on the number of taps.
        """
        pieces = []
        for block in self.blocks:
            there = tuple(block.taps)
            places = None if there == self.taps else [there.index(tap) for tap in self.taps]
            for chunk in block.chunks:
                records = (chunk.records() if isinstance(chunk, Scattered) else chunk).numpy()
                pieces.append(records if places is None else records[:, places])
        if not pieces:
            width = self.nothing.codec.row_bytes(self.nothing.hidden, self.nothing.dtype)
            return np.zeros((len(self.taps), 0, width), np.uint8)
        every = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if self.chosen is not None:
            every = every[self.chosen.numpy()]
        found: NDArray[np.uint8] = every.transpose(1, 0, 2)
        return found


class GatheredRows(Mapping[Tap, Rows]):
    """Rows of each tap, made when they are looked at: few callers read those of all layers.

    Attributes:
        groups: the rows by taps that were captured together; no tap is in two of them.
    """

    def __init__(self, taps: Sequence[Tap], groups: Sequence[RowGroup]) -> None:
        """Create it.

        Args:
            taps: all taps of the groups, in the order in which they are shown.
            groups: the rows.
        """
        self.groups = tuple(groups)
        self._groups = self._by_tap(taps, self.groups)

    def group(self, tap: Tap) -> RowGroup:
        """Return the group of a tap."""
        return self._groups[tap]

    @property
    def owns_memory(self) -> bool:
        """Whether no row is in a worker's memory."""
        return not any(block.is_leased for group in self.groups for block in group.blocks)

    def positions(self) -> dict[Tap, Tensor]:
        """Return the positions of each tap, int64 [rows]."""
        return self._by_tap(self._groups, [group.positions for group in self.groups])

    def counts(self) -> dict[Tap, int]:
        """Return the number of rows of each tap."""
        return self._by_tap(self._groups, [len(group.positions) for group in self.groups])

    def _by_tap(self, taps: Iterable[Tap], values: Sequence[T]) -> dict[Tap, T]:
        """Return by tap, in this order, what each group has."""
        if len(self.groups) == 1:
            return dict.fromkeys(taps, values[0])
        pairs = zip(self.groups, values, strict=True)
        found = {tap: value for group, value in pairs for tap in group.taps}
        return {tap: found[tap] for tap in taps}

    def __getitem__(self, tap: Tap) -> Rows:
        return self._groups[tap].rows_of(tap)

    def __contains__(self, tap: object) -> bool:
        return tap in self._groups

    def __iter__(self) -> Iterator[Tap]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)
