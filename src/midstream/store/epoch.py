"""The order of an epoch: which rank and worker reads which items, and how far an epoch is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.store.format.entry import check_number
from midstream.validation import kind, show

LARGEST = 2**31 - 1
MAX_WORKERS = 1024
_Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochOrder:
    """Divides the items of an epoch into batches of ranks and of their loaders' workers.

    Chunks of consecutive items are put in an order, a random one if `shuffle`. Each rank has an
    equal part of that order, each worker a part of its rank's batches.
    """

    items: int
    batch_size: int
    chunk: int  # consecutive items that stay together in the order of chunks
    buffer: int  # items that are permuted together, at least a batch
    shuffle: bool
    seed: int
    rank: int
    world_size: int
    drop_last: bool  # whether all batches are full, so that a remainder is not read

    def __post_init__(self) -> None:
        # Of more ranks than items, or of batches of one item.
        if not self.drop_last and self.batches > self.items // self.world_size:
            raise StoreError(
                f"drop_last: expected True: {self.items} items cannot be divided into batches of "
                f"{self.batch_size} so that {self.world_size} ranks have the same number of them"
            )

    @property
    def batches(self) -> int:
        """The batches of a rank in an epoch, the same for all ranks."""
        if self.drop_last:
            return self.items // (self.world_size * self.batch_size)
        return -(-self.items // (self.world_size * self.batch_size))

    def terms(self) -> dict[str, int]:
        """Return what must be the same for an interrupted epoch to go on."""
        names = [name for name in self.__slots__ if name != "chunk"]
        return {name: int(getattr(self, name)) for name in names}

    def windows(
        self, epoch: int, worker: int, workers: int, done: int = 0
    ) -> Iterator[list[_Ints]]:
        """Yield a worker's batches of item indices, those that are permuted together at a time.

        `done`: so many batches of the worker are left out.
        """
        batches = self.batches
        starts, ends = self._chunks(epoch)
        if not self.shuffle:
            # The workers take turns, so that a loader has the order of the items.
            for batch in range(worker + done * workers, batches, workers):
                yield [self._items(starts, ends, self._cut(batch), self._cut(batch + 1))]
            return
        share, more = divmod(batches, workers)
        first = worker * share + min(worker, more)
        last = first + share + (worker < more)
        together = max(1, self.buffer // self.batch_size)
        for number in range(done // together, -(-(last - first) // together)):
            low = first + number * together
            cuts = [self._cut(batch) for batch in range(low, min(low + together, last) + 1)]
            names = (self.seed, epoch, self.world_size, self.rank, workers, worker, number)
            items = self._items(starts, ends, cuts[0], cuts[-1])
            items = np.random.default_rng(names).permutation(items)
            window = np.split(items, np.array(cuts[1:-1], np.int64) - cuts[0])
            if window := window[max(0, first + done - low) :]:
                yield window

    def _share(self) -> tuple[int, int]:
        """Return the place in the order and the number of the rank's items."""
        if self.drop_last:
            count = self.batches * self.batch_size
            return self.rank * count, count
        first = self.rank * self.items // self.world_size
        return first, (self.rank + 1) * self.items // self.world_size - first

    def _cut(self, batch: int) -> int:
        """Return the place in the order at which a batch of this rank begins.

        Where a rank has fewer items than another, its last batches are smaller, none is empty.
        """
        first, count = self._share()
        return first + min(batch * self.batch_size, count - (self.batches - batch))

    def _chunks(self, epoch: int) -> tuple[_Ints, _Ints]:
        """Return the first item of each chunk, in the order, and where it ends in the order."""
        starts = np.arange(0, self.items, self.chunk, dtype=np.int64)
        if self.shuffle:
            # All ranks and workers must agree on this order.
            starts = np.random.default_rng((self.seed, epoch)).permutation(starts)
        return starts, np.minimum(self.chunk, self.items - starts).cumsum()

    def _items(self, starts: _Ints, ends: _Ints, first: int, last: int) -> _Ints:
        """Return the items at the places [first, last) of the order."""
        low = int(np.searchsorted(ends, first, side="right"))
        high = int(np.searchsorted(ends, last, side="left")) + 1
        sizes = np.diff(ends[low:high], prepend=ends[low - 1] if low else 0)
        # The item at place p of a chunk is p − (end − size) + start.
        shift = starts[low:high] - (ends[low:high] - sizes)
        return (
            np.arange(first, last)
            + np.repeat(shift, sizes)[first - int(ends[low] - sizes[0]) :][: last - first]
        )


class EpochProgress:
    """The epoch and where it is, in memory that the workers of a loader share."""

    def __init__(self, order: EpochOrder) -> None:
        self._order = order
        # Epoch, batches of the rank that are done, workers that have read them (0: this process);
        # for each worker, whether it has still to begin after those.
        self._shared = torch.zeros(3 + MAX_WORKERS, dtype=torch.int64).share_memory_()
        self._own: tuple[int, int, int] | None = None  # of this process: worker, workers, batches
        self._loaded: tuple[int, int, int] | None = None  # the same, where it is to begin

    @property
    def epoch(self) -> int:
        return int(self._shared[0])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; a place that was loaded is kept if it is of this epoch."""
        number = check_number("epoch", epoch, 0, LARGEST)
        if number != self.epoch:
            self._shared.zero_()
            self._shared[0] = number
            self._own = self._loaded = None

    def begin(self, worker: int | None, workers: int) -> tuple[int, int]:
        """Return (worker, batches) from which a process reads; `worker` None: without a loader.

        Raises:
            StoreError: the place that was loaded is of another number of workers.
        """
        if workers > MAX_WORKERS:
            raise StoreError(f"num_workers: expected at most {MAX_WORKERS}, got {workers}")
        number = worker or 0
        done = 0
        if self._loaded:
            number, _, done = self._loaded
            self._check_workers(self._loaded[1], workers)
        elif self._shared[3 + number]:
            total = int(self._shared[1])
            self._check_workers(int(self._shared[2]) or 1, workers)
            # Batch i of a rank is of worker i % workers: the first is that of the next batch.
            number = (number + total) % workers
            done = len(range(number, total, workers))
        self._loaded = None
        self._shared[3 + (worker or 0)] = 0
        self._shared[2] = 0 if worker is None else workers
        self._own = number, workers, done
        return number, done

    def advance(self) -> None:
        """Count a batch that this process has read."""
        assert self._own
        worker, workers, done = self._own
        self._own = worker, workers, done + 1

    def state(self, batches: int | None, in_worker: bool) -> dict[str, Any]:
        """Return the state; see `EpochDataset.state_dict`."""
        terms: dict[str, Any] = {"epoch": self.epoch, **self._order.terms()}
        if in_worker:
            worker, workers, done = self._own or (0, 1, 0)
            return terms | {"workers": workers, "worker": worker, "batches": done}
        workers = int(self._shared[2])
        pending = bool(self._shared[3])
        if batches is None:
            if workers and not pending:
                raise StoreError(
                    "batches: expected the number of batches that the loader has given in this "
                    "epoch: its workers read ahead; or use torchdata's StatefulDataLoader"
                )
            batches = int(self._shared[1]) if pending else self._own[2] if self._own else 0
        number = check_number("batches", batches, 0, self._order.batches)
        return terms | {"workers": max(1, workers), "batches": number}

    def load(self, state: Mapping[str, Any], in_worker: bool) -> None:
        """Take over a state; see `EpochDataset.load_state_dict`."""
        if not isinstance(state, Mapping):
            raise StoreError(f"state: expected what state_dict() returns, got {kind(state)}")
        terms = self._order.terms()
        known = {*terms, "epoch", "workers", "batches"}
        if missing := sorted(known - set(state)):
            raise StoreError(f"state: {missing[0]}: missing; expected what state_dict() returns")
        for name, value in terms.items():
            if state[name] != value:
                got = show(repr(state[name]))
                raise StoreError(f"state: {name}: expected {value} as in this dataset, got {got}")
        epoch = check_number("state: epoch", state["epoch"], 0, LARGEST)
        workers = check_number("state: workers", state["workers"], 1, MAX_WORKERS)
        batches = check_number("state: batches", state["batches"], 0, self._order.batches)
        if ("worker" in state) != in_worker:
            where = "a worker's, which its loader loads" if "worker" in state else "a rank's"
            raise StoreError(f"state: it is {where}")
        self._shared[0] = epoch
        if in_worker:
            worker = check_number("state: worker", state["worker"], 0, workers - 1)
            self._own = self._loaded = worker, workers, batches
            return
        self._shared[1], self._shared[2] = batches, workers
        self._shared[3:] = 1

    def _check_workers(self, expected: int, workers: int) -> None:
        if workers != expected and self._order.shuffle:
            raise StoreError(
                f"num_workers: the epoch was begun with {expected} workers, got {workers}: the "
                "order of its rows is another"
            )
