"""PyTorch dataset that reads the batches of an epoch ahead, by threads."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from midstream.errors import StoreError
from midstream.store.epoch import LARGEST, EpochOrder, EpochProgress
from midstream.store.format.entry import check_number
from midstream.store.reader_threads import ReaderThreads
from midstream.validation import kind

Columns = dict[str, "Tensor | dict[str, Tensor]"]
_Ints = NDArray[np.int64]
_Windows = Iterator[list[_Ints]]
_Unit = Sequence[int]  # where batches begin in their window, and where the last ends
W = TypeVar("W")
_THREADS = min(4, os.cpu_count() or 1)
_MAX_PREFETCH = 1024


class EpochSource(Protocol[W]):
    """What an epoch reads: numbered items, of which it reads some at a time: a window."""

    @property
    def is_mapped(self) -> bool:
        """Whether single items are read as fast as many that are next to each other."""

    def prepare(self, items: _Ints) -> W:
        """Check the bytes of a window's items, and have the system read them ahead."""

    def read(self, window: W, first: int, last: int) -> Columns:
        """Return the columns of the items [first, last) of a window, each [last - first, …]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of an epoch that this rank reads."""

    rank: int
    world_size: int
    drop_last: bool

    @staticmethod
    def read(rank: object, world_size: object, drop_last: bool) -> Share:
        """Return the checked values. Default: those of torch.distributed, if it is initialised."""
        if (rank is None) != (world_size is None):
            raise StoreError("rank: expected both of rank and world_size, or neither")
        if rank is None:
            ranks = torch.distributed
            known = ranks.is_available() and ranks.is_initialized()
            rank, world_size = (ranks.get_rank(), ranks.get_world_size()) if known else (0, 1)
        size = check_number("world_size", world_size, 1, LARGEST)
        own = check_number("rank", rank, 0, size - 1)
        return Share(rank=own, world_size=size, drop_last=check_bool("drop_last", drop_last))


def check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise StoreError(f"{name}: expected `bool`, got {kind(value)}")
    return value


class EpochDataset(IterableDataset[Columns]):
    """Batches of an epoch, for `torch.utils.data.DataLoader(dataset, batch_size=None)`.

    The loader's workers and the ranks divide the batches; all ranks have the same number of them.
    """

    def __init__(self, source: EpochSource[Any], order: EpochOrder, prefetch: int) -> None:
        self._source = source
        self._order = order
        self._prefetch = check_number("prefetch", prefetch, 0, _MAX_PREFETCH)
        self._progress = EpochProgress(order)

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch."""
        return self._order.batches

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0, also for persistent workers.

        Raises:
            StoreError: the number is out of range.
        """
        self._progress.set_epoch(epoch)

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return where the epoch is, as JSON values, for `load_state_dict`.

        torchdata's StatefulDataLoader calls both by itself.

        Args:
            batches: batches of this epoch that were used, those before a restart included. It is
                needed if a loader with workers reads, because these read ahead; otherwise it is
                counted here.

        Raises:
            StoreError: `batches` is needed, or out of range.
        """
        return self._progress.state(batches, get_worker_info() is not None)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on after the batches of a state.

        `set_epoch` of the same epoch keeps this; of another epoch begins at its start.

        Raises:
            StoreError: the state is of other rows, sizes, ranks or of another order. During
                iteration: it is of another number of workers, and the rows are shuffled.
        """
        self._progress.load(state, get_worker_info() is not None)

    def __iter__(self) -> Iterator[Columns]:
        info = get_worker_info()
        workers = info.num_workers if info else 1
        worker, done = self._progress.begin(info.id if info else None, workers)
        windows = self._order.windows(self._progress.epoch, worker, workers, done)
        return self._count(self._read_ahead(windows) if self._prefetch else self._read_now(windows))

    def _count(self, batches: Iterator[Columns]) -> Iterator[Columns]:
        for batch in batches:
            self._progress.advance()
            yield batch

    def _read_now(self, windows: _Windows) -> Iterator[Columns]:
        for window in windows:
            prepared = self._prepare(window)
            for unit in self._units(window):
                yield from self._read(unit, prepared)

    def _read_ahead(self, windows: _Windows) -> Iterator[Columns]:
        threads = ReaderThreads(min(_THREADS, self._prefetch))
        waiting: deque[Future[list[Columns]]] = deque()
        try:
            for reading in self._submit(threads, windows):
                waiting.append(reading)
                if len(waiting) > self._prefetch:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            threads.close()

    def _submit(self, threads: ReaderThreads, windows: _Windows) -> Iterator[Future[list[Columns]]]:
        """Yield the reads of all batches, each submitted as it is asked for."""
        following = None
        for window, coming in _with_next(windows):
            ready = following or threads.submit(partial(self._prepare, window))
            following = coming and threads.submit(partial(self._prepare, coming))
            for unit in self._units(window):
                yield threads.submit(partial(self._read_when, ready, unit))

    def _prepare(self, window: list[_Ints]) -> Any:
        return self._source.prepare(np.concatenate(window))

    def _units(self, window: list[_Ints]) -> Sequence[_Unit]:
        """Return the batches that are read at once: of an object store, all of a window."""
        cuts = [0, *itertools.accumulate(map(len, window))]
        return list(itertools.pairwise(cuts)) if self._source.is_mapped else [cuts]

    def _read_when(self, ready: Future[Any], unit: _Unit) -> list[Columns]:
        return self._read(unit, ready.result())

    def _read(self, unit: _Unit, prepared: Any) -> list[Columns]:
        columns = self._source.read(prepared, unit[0], unit[-1])
        if len(unit) == 2:
            return [columns]
        return [_rows(columns, first, last) for first, last in itertools.pairwise(unit)]


def _with_next(windows: _Windows) -> Iterator[tuple[list[_Ints], list[_Ints] | None]]:
    window = next(windows, None)
    while window is not None:
        coming = next(windows, None)
        yield window, coming
        window = coming


def _rows(columns: Columns, first: int, last: int) -> Columns:
    """Copy rows: a view would keep all the others."""
    return {
        name: {key: part[first:last].clone() for key, part in column.items()}
        if isinstance(column, dict)
        else column[first:last].clone()
        for name, column in columns.items()
    }
