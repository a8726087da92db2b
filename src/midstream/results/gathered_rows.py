"""Captured rows of one completion by site and layer, in the blocks that the workers sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from midstream.results.encoded_rows import Chunk, Rows, Scattered, UnreadChunks
from midstream.sites import Tap

if TYPE_CHECKING:
    from torch import Tensor


class Block(Protocol):
    """Rows of some taps at the same positions."""

    @property
    def taps(self) -> Sequence[Tap]:
        """The taps, in the order within a record."""

    @property
    def chunks(self) -> Sequence[Chunk]:
        """[positions, taps, bytes of a row] each, one after the other."""

    @property
    def is_leased(self) -> bool:
        """Whether the chunks are in a worker's memory, which they keep in use."""


class RowGroup:
    """Rows of taps of the same positions, `chosen` or all; `nothing`: an empty block."""

    __slots__ = ("_positions", "blocks", "chosen", "nothing", "taps")

    def __init__(
        self,
        taps: tuple[Tap, ...],
        positions: Tensor | NDArray[np.int64],
        blocks: Sequence[Block],
        chosen: Tensor | None,
        nothing: Rows,
    ) -> None:
        """Create it; `positions` int64 [rows] ascend. Callers get a copy of an array."""
        self.taps = taps
        self._positions = positions
        self.blocks = blocks
        self.chosen = chosen
        self.nothing = nothing

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def positions(self) -> Tensor:
        """The position of each row, int64 [rows], ascending."""
        if isinstance(self._positions, np.ndarray):
            import torch

            self._positions = torch.from_numpy(self._positions.copy())
        return self._positions

    @property
    def places(self) -> NDArray[np.int64]:
        """The positions as an array, which may be shared and is only read."""
        positions = self._positions
        return positions if isinstance(positions, np.ndarray) else positions.numpy()

    def rows_of(self, tap: Tap) -> Rows:
        """Return the rows of one tap."""
        chunks: list[Chunk] = []
        places: list[int] = []
        for block in self.blocks:
            chunks += block.chunks
            places += [block.taps.index(tap)] * len(block.chunks)
        return replace(self.nothing, chunks=tuple(chunks), places=tuple(places), chosen=self.chosen)

    def decoded(self) -> Sequence[Tensor] | None:
        """Return each tap's decoded rows as views of one tensor; None: not raw, or in pieces."""
        from midstream.codecs.base import view_as

        nothing, blocks = self.nothing, self.blocks
        if self.chosen is not None or len(blocks) != 1 or nothing.codec.spec != "raw":
            return None
        taps, chunks = blocks[0].taps, blocks[0].chunks
        if len(chunks) != 1:
            return None
        chunk = chunks[0]
        width = nothing.hidden * nothing.dtype.itemsize
        if isinstance(chunk, Scattered) or chunk.shape[1:] != (len(taps), width):
            return None
        every = view_as(chunk, nothing.dtype).unbind(1)
        if taps == self.taps:
            return every
        # A block may have taps of other groups too.
        by_tap = dict(zip(taps, every, strict=True))
        return [by_tap[tap] for tap in self.taps]

    def encoded(self) -> NDArray[np.uint8]:
        """Return all taps' encoded rows, uint8 [taps, rows, bytes of a row], only to be read."""
        pieces = []
        for block in self.blocks:
            there = tuple(block.taps)
            places = None if there == self.taps else [there.index(tap) for tap in self.taps]
            for records in _arrays(block.chunks):
                pieces.append(records if places is None else records[:, places])
        if not pieces:
            width = self.nothing.codec.row_bytes(self.nothing.hidden, self.nothing.dtype)
            return np.zeros((len(self.taps), 0, width), np.uint8)
        every = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if self.chosen is not None:
            every = every[self.chosen.numpy()]
        encoded: NDArray[np.uint8] = every.transpose(1, 0, 2)
        return encoded


def _arrays(chunks: Sequence[Chunk]) -> list[NDArray[np.uint8]]:
    """Return the chunks of a block as arrays that are only read."""
    if isinstance(chunks, UnreadChunks):
        return [chunks.array]
    return [
        (chunk.records() if isinstance(chunk, Scattered) else chunk).numpy() for chunk in chunks
    ]


class GatheredRows(Mapping[Tap, Rows]):
    """Rows of each tap, made when they are looked at: few callers read those of all layers."""

    def __init__(
        self,
        taps: Iterable[Tap],
        groups: Sequence[RowGroup],
        numbers: Mapping[Tap, int] | None = None,
    ) -> None:
        """Create it; `numbers` are `numbers_of` these, which alike completions share."""
        self.groups = tuple(groups)
        self._numbers = numbers_of(taps, groups) if numbers is None else numbers

    def group(self, tap: Tap) -> RowGroup:
        """Return the group of a tap."""
        return self.groups[self._numbers[tap]]

    @property
    def owns_memory(self) -> bool:
        """Whether no row is in a worker's memory."""
        return not any(block.is_leased for group in self.groups for block in group.blocks)

    def positions(self) -> Mapping[Tap, Tensor]:
        """Return the positions of each tap, int64 [rows]; tensors are made when looked at."""
        return _Positions(self)

    def counts(self) -> dict[Tap, int]:
        """Return the number of rows of each tap."""
        return {tap: len(self.groups[index]) for tap, index in self._numbers.items()}

    def __getitem__(self, tap: Tap) -> Rows:
        return self.group(tap).rows_of(tap)

    def __contains__(self, tap: object) -> bool:
        return tap in self._numbers

    def __iter__(self) -> Iterator[Tap]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


class _Positions(Mapping[Tap, "Tensor"]):
    """Positions of each tap of some rows."""

    def __init__(self, rows: GatheredRows) -> None:
        self._rows = rows

    def __getitem__(self, tap: Tap) -> Tensor:
        return self._rows.group(tap).positions

    def __iter__(self) -> Iterator[Tap]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)


class _HasTaps(Protocol):
    @property
    def taps(self) -> tuple[Tap, ...]: ...


def numbers_of(taps: Iterable[Tap], groups: Sequence[_HasTaps]) -> dict[Tap, int]:
    """Return the index of each tap's group, in the order of `taps`."""
    indices = {tap: index for index, group in enumerate(groups) for tap in group.taps}
    return {tap: indices[tap] for tap in taps}
