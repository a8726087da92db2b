"""PyTorch dataset over the rows of a selection, shuffled and batched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from midstream.store.format.entry import check_number
from midstream.store.selection import Selection, as_selection

# Consecutive rows that are read together, so that a shuffled epoch reads contiguous chunks.
_RUN = 256
_LARGEST = 2**31 - 1


class RowDataset(IterableDataset[Mapping[str, Tensor]]):
    """Batches with every row of a selection exactly once per epoch.

    Use it as `torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=…)`: the dataset
    makes the batches itself. The loader's workers divide the rows among themselves, so that each
    row is read by one worker. The last batch of each worker may be smaller.

    A batch is a dict of tensors on the host:

    - `values` [n, width]: decoded; in the model's dtype for codec raw, float32 for other codecs;
    - `index` int64 [n]: indices of the rows in the selection; `selection.take(index)` gives the
      remaining columns: site, request, tag;
    - `layer`, `position`, `token_id` int64 [n].

    Shuffling reads contiguous chunks of 256 rows in random order into a buffer and permutes the
    buffer. The order is determined by `seed`, the epoch and the number of workers. Call `set_epoch`
    before each epoch; otherwise every epoch has the same order.
    """

    def __init__(
        self,
        selection: Selection,
        batch_size: int,
        *,
        shuffle: bool = True,
        buffer: int = 16384,
        seed: int = 0,
    ) -> None:
        """Args:
        selection: the rows, or a store, of which it is all rows.
        batch_size: rows per batch.
        shuffle: whether the order is random; otherwise it is that of the selection, where
            several workers take turns in chunks of 256 rows.
        buffer: rows in the shuffle buffer of each worker, at least `batch_size`. Rows that are
            further apart in the order of chunks are never in one batch.
        seed: 0 to 2**31 - 1.

        Raises:
            StoreError: a number is out of range, or the taps differ in width.
        """
        self.selection = as_selection(selection)
        self.selection.width()
        self.batch_size = check_number("batch_size", batch_size, 1, _LARGEST)
        self.shuffle = shuffle
        self.buffer = check_number("buffer", buffer, 1, _LARGEST)
        self.seed = check_number("seed", seed, 0, _LARGEST)
        # In shared memory, for workers that persist from epoch to epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, from 0, also for persistent workers.

        Raises:
            StoreError: the number is out of range.
        """
        self._epoch.fill_(check_number("epoch", epoch, 0, _LARGEST))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for indices in self._orders(worker, workers):
            yield from self._read(indices)

    def _orders(self, worker: int, workers: int) -> Iterator[NDArray[np.int64]]:
        """Yield a worker's row indices, one buffer at a time: whole batches, except in the last."""
        epoch = int(self._epoch)
        rows = len(self.selection)
        runs = np.arange(-(-rows // _RUN))
        if self.shuffle:
            # All workers must agree on this order.
            runs = np.random.default_rng((self.seed, epoch)).permutation(runs)
        own_runs = runs[worker::workers]
        generator = np.random.default_rng((self.seed, epoch, workers, worker))
        per_buffer = max(1, max(self.buffer, self.batch_size) // _RUN)
        left = np.empty(0, np.int64)
        for first in range(0, len(own_runs), per_buffer):
            starts = own_runs[first : first + per_buffer] * _RUN
            indices = (starts[:, None] + np.arange(_RUN)).reshape(-1)
            indices = np.concatenate([left, indices[indices < rows]])
            if self.shuffle:
                indices = generator.permutation(indices)
            is_last = first + per_buffer >= len(own_runs)
            whole = len(indices) if is_last else len(indices) // self.batch_size * self.batch_size
            left = indices[whole:]
            if whole:
                yield indices[:whole]

    def _read(self, indices: NDArray[np.int64]) -> Iterator[dict[str, Tensor]]:
        batch = self.selection.take(indices)
        columns = {
            "values": batch.values,
            "index": torch.from_numpy(indices),
            "layer": batch.layer,
            "position": batch.position,
            "token_id": batch.token_id,
        }
        for start in range(0, len(indices), self.batch_size):
            # A view would send the whole buffer from process to process with each batch.
            yield {
                name: column[start : start + self.batch_size].clone()
                for name, column in columns.items()
            }
