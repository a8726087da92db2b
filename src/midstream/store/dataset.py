"""PyTorch dataset over the rows of a selection, shuffled and batched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.sites import Tap
from midstream.store.epoch import LARGEST, EpochOrder
from midstream.store.epoch_dataset import Columns, EpochDataset, Share, check_bool
from midstream.store.format.entry import check_number
from midstream.store.loss_mask import LossMasks
from midstream.store.row_memory import RowMemory
from midstream.store.row_places import RowPlaces
from midstream.store.selection import Selection, as_selection
from midstream.store.store import Store
from midstream.store.tokens import TokenPart, Tokens
from midstream.validation import kind, show

# Consecutive rows that are shuffled together, so that an epoch reads contiguous chunks.
_CHUNK = 256
_Ints = NDArray[np.int64]


class RowDataset(EpochDataset):
    """Batches with every row of a selection exactly once per epoch.

    Use it as `torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=…)`: the dataset
    makes the batches itself, and reads ahead by threads, also without workers. Ranks and workers
    divide the batches among themselves, so that each row is read once. All ranks have the same
    number of batches, `len(dataset)`, of which one or two may be smaller.

    A batch is a dict of tensors on the host:

    - `values` [n, width]: decoded; in the model's dtype for codec raw, float32 for other codecs;
    - `index` int64 [n]: indices of the rows in the selection; `selection.take(index)` gives the
      remaining columns: site, request, tag;
    - `layer`, `position`, `token_id` int64 [n];
    - `loss_mask` bool [n]: whether the token is the assistant's, of a message or generated; of a
      request whose roles were not stored, all are True.

    With `join`, a row is a token: `values` is [n, taps, width] in the order of `join`, or a dict of
    [n, width] by tap, `mlp_in.2`, if the taps differ in width. `index` is that of the token's row
    at the first tap, and there is no `layer`. Tokens with rows at some of the taps only are left
    out; `skipped` is their number.

    Shuffling puts contiguous chunks of 256 rows of all shards in random order, and permutes as many
    rows of that order as `buffer` says. The order is determined by `seed`, the epoch and the number
    of ranks and workers. Call `set_epoch` before each epoch; otherwise every epoch has the same
    order.

    Attributes:
        skipped: number of tokens of the selection that lack a row at a tap of `join`.
        taps: (site, layer) of `join`; None without.
    """

    def __init__(
        self,
        selection: Selection | Store,
        batch_size: int,
        *,
        join: Sequence[Tap | str] | None = None,
        exclude: Literal["first"] | None = None,
        shuffle: bool = True,
        buffer: int = 16384,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch: int = 4,
        pin_memory: bool = False,
        checksums: bool = True,
    ) -> None:
        """Args:
        selection: the rows, or a store, of which it is all rows.
        batch_size: rows per batch.
        join: (site, layer) whose rows of the same token make one row; also names of them.
        exclude: "first" leaves out the first token of each prompt, whose norm is often a hundred
            times that of others.
        shuffle: whether the order is random; otherwise it is that of the selection.
        buffer: rows of which a batch is drawn, at least `batch_size`. They are not held in memory,
            except those of an object store.
        seed: 0 to 2**31 - 1.
        drop_last: whether every batch is full: fewer than `world_size * batch_size` rows, others
            in each shuffled epoch, are not read.
        rank, world_size: this process and the number of those that share an epoch; default: those
            of torch.distributed if it is initialised, else 0 of 1.
        prefetch: batches that are read ahead, by threads; 0: none.
        pin_memory: whether tensors are in pinned memory, where there is a CUDA device. With
            workers, give it to the loader instead.
        checksums: whether bytes are compared with their checksums when they are first read; False
            is faster, for a store that `midstream verify` has checked.

        Raises:
            StoreError: an argument is malformed or out of range, the taps differ in width without
                `join`, or no token has rows at all taps of `join`.
        """
        self.selection = as_selection(selection)
        tokens = Tokens(self.selection, join)
        if check_exclude(exclude):
            tokens.drop_first()
        self.skipped, self.taps = tokens.skipped, tokens.taps
        self.batch_size = check_number("batch_size", batch_size, 1, LARGEST)
        share = Share.read(rank, world_size, drop_last)
        order = EpochOrder(
            items=len(tokens),
            batch_size=self.batch_size,
            chunk=_CHUNK,
            buffer=check_number("buffer", buffer, 1, LARGEST),
            shuffle=check_bool("shuffle", shuffle),
            seed=check_number("seed", seed, 0, LARGEST),
            rank=share.rank,
            world_size=share.world_size,
            drop_last=share.drop_last,
        )
        memory = RowMemory(check_bool("pin_memory", pin_memory))
        super().__init__(
            TokenSource(tokens, memory, check_bool("checksums", checksums)), order, prefetch
        )


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Tokens of which batches are drawn."""

    parts: list[TokenPart]
    places: list[RowPlaces]  # of each bundle's rows; none if the store is not mapped
    columns: dict[str, NDArray[np.generic]]  # each [n]


class TokenSource:
    """The tokens of a `RowDataset` as items of an epoch; see `EpochSource`."""

    def __init__(self, tokens: Tokens, memory: RowMemory, checked: bool) -> None:
        self._tokens = tokens
        self._memory = memory
        self._checked = checked
        self._masks = LossMasks()

    @property
    def is_mapped(self) -> bool:
        return self._tokens.is_mapped

    def prepare(self, items: _Ints) -> TokenWindow:
        tokens, order = self._tokens, np.argsort(items)
        ascending = list(tokens.parts(items[order]))
        tokens.prepare(ascending, self._checked)
        parts = [replace(part, where=order[part.where]) for part in ascending]
        names = ["index", "position", "token_id", *(["layer"] if tokens.taps is None else [])]
        columns = {name: np.empty(len(items), np.int64) for name in names}
        mask = np.empty(len(items), np.bool_)
        for part in parts:
            mask[part.where] = self._masks.of(part.segment, part.at)
            columns["index"][part.where] = part.segment.index(part.at)
            for name in ("position", "token_id"):
                columns[name][part.where] = part.segment.column(name, part.at)
            if "layer" in columns:
                columns["layer"][part.where] = part.segment.taps[0][1]
        bundles = tokens.bundles() if tokens.is_mapped else []
        places = [tokens.locate(parts, bundle, len(items)) for bundle in bundles]
        return TokenWindow(parts, places, {**columns, "loss_mask": mask})

    def read(self, window: TokenWindow, first: int, last: int) -> Columns:
        tokens, memory = self._tokens, self._memory
        values = []
        for number, bundle in enumerate(tokens.bundles()):
            taps, width = tokens.width(bundle)
            data = memory.empty((last - first, taps, width))
            if window.places:
                window.places[number].copy(first, last, data)
            else:
                tokens.fetch(window.parts, bundle, data.numpy(), self._checked)
            values.append(memory.hold(tokens.decode(bundle, data)))
        columns = {
            name: memory.hold(torch.from_numpy(column[first:last].copy()))
            for name, column in window.columns.items()
        }
        return {"values": tokens.named(values), **columns}


def check_exclude(value: object) -> bool:
    """Return whether the first token of each prompt is left out."""
    if value is not None and value != "first":
        got = show(value) if isinstance(value, str) else kind(value)
        raise StoreError(
            f'exclude: expected "first" or None, got {got}; leave out others by '
            "store.select(position=…)"
        )
    return value == "first"
