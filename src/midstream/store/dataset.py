"""Rows of a selection as a dataset of PyTorch's: shuffled, batched, shared out among workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from midstream.store.entry import check_number
from midstream.store.selection import Selection

# Rows that are read together: they lie near each other, so that a shuffled epoch reads runs.
_RUN = 256
_LARGEST = 2**31 - 1


class RowDataset(IterableDataset[Mapping[str, Tensor]]):
    """Batches of rows: every row of a selection exactly once in each epoch.

    Hand it to `torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=…)`: it makes the
    batches itself, and its workers share the rows out among them, so that each row comes from one
    of them. The last batch of each worker may be smaller.

    A batch is a dict of tensors on the host:

    - `values` [n, width]: decoded, in the model's dtype by codec raw, in float32 by others;
    - `index` int64 [n]: which rows of the selection they are, so that `selection.take` tells the
      rest of them: site, request, tag;
    - `layer`, `position`, `token_id` int64 [n].

    To shuffle, runs of 256 rows, in an order by chance, fill a buffer, whose rows come out in an
    order by chance. The order follows from `seed`, the epoch and the number of workers. Call
    `set_epoch` before each epoch; otherwise all are in one order.
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
        selection: the rows.
        batch_size: how many of them a batch has.
        shuffle: whether they come in an order by chance, or in that of the selection (with
            several workers, run by run in turns).
        buffer: rows that each worker holds in memory; what is further apart than that in the
            order of runs is never in one batch. At least `batch_size` are held.
        seed: 0 to 2**31 - 1.

        Raises:
            StoreError: a number out of range.
        """
        self.selection = selection
        self.batch_size = check_number("batch_size", batch_size, 1, _LARGEST)
        self.shuffle = shuffle
        self.buffer = check_number("buffer", buffer, 1, _LARGEST)
        self.seed = check_number("seed", seed, 0, _LARGEST)
        # Shared with workers that live on from epoch to epoch.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration is, from 0; workers that live on are told too.

        Raises:
            StoreError: a number out of range.
        """
        self._epoch.fill_(check_number("epoch", epoch, 0, _LARGEST))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for indices in self._orders(worker, workers):
            yield from self._read(indices)

    def _orders(self, worker: int, workers: int) -> Iterator[NDArray[np.int64]]:
        """Indices of the rows of one worker, a buffer at a time, whole batches but for the last."""
        epoch = int(self._epoch)
        rows = len(self.selection)
        runs = np.arange(-(-rows // _RUN))
        if self.shuffle:
            # All workers must agree on this order.
            runs = np.random.default_rng((self.seed, epoch)).permutation(runs)
        mine = runs[worker::workers]
        chance = np.random.default_rng((self.seed, epoch, workers, worker))
        per_buffer = max(1, max(self.buffer, self.batch_size) // _RUN)
        left = np.empty(0, np.int64)
        for first in range(0, len(mine), per_buffer):
            starts = mine[first : first + per_buffer] * _RUN
            found = (starts[:, None] + np.arange(_RUN)).reshape(-1)
            found = np.concatenate([left, found[found < rows]])
            if self.shuffle:
                found = chance.permutation(found)
            is_last = first + per_buffer >= len(mine)
            whole = len(found) if is_last else len(found) // self.batch_size * self.batch_size
            left = found[whole:]
            if whole:
                yield found[:whole]

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
            # Clones, or each batch would drag the whole buffer from process to process.
            yield {
                name: column[start : start + self.batch_size].clone()
                for name, column in columns.items()
            }
