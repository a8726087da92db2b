"""PyTorch dataset of whole sequences with the rows of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.sites import Tap
from midstream.store.dataset import check_exclude
from midstream.store.epoch import LARGEST, EpochOrder
from midstream.store.epoch_dataset import Columns, EpochDataset, Share, check_bool
from midstream.store.format.entry import check_number
from midstream.store.format.layout import MAX_POSITION
from midstream.store.loss_mask import LossMasks
from midstream.store.row_memory import RowMemory
from midstream.store.selection import Selection, as_selection
from midstream.store.sequences import Sequences, pack, padding, place, whole_sequences
from midstream.store.store import Store
from midstream.store.tokens import TokenPart, Tokens
from midstream.validation import kind, listed, show

_LOSSES = ("all", "prompt", "generated")
_OVERFLOWS = ("truncate", "split")
_Ints = NDArray[np.int64]


class SequenceDataset(EpochDataset):
    """Batches of whole completions, padded or packed to a length, with their rows.

    Loaders, ranks, `set_epoch`, `len` and the state are as of `RowDataset`; an item is a row of
    `length` tokens. A batch is a dict of tensors on the host:

    - `values` [n, length, taps, width] in the order of `join`; or a dict of [n, length, width] by
      tap if the taps differ in width. Dtypes are those of `RowDataset`. 0 at padding;
    - `input_ids`, `positions` int64 [n, length]: 0 at padding;
    - `attention_mask` bool [n, length]: whether there is a token;
    - `loss_mask` bool [n, length]: whether the token counts for the loss;
    - `document` int64 [n, length]: number of the token's sequence in its row, -1 at padding;
    - `index` int64 [n, length]: index in the selection of the token's row at the first tap, -1 at
      padding; `selection.take` gives request and tag;
    - `lengths` int64 [n]: tokens of each row.

    Only completions whose tokens follow one another and have a row at every tap are read. The last
    generated token has no row, since the model did not run on it.

    Attributes:
        skipped: number of completions that were left out: a token lacks a row.
        truncated: number of tokens beyond `length`, with `overflow="truncate"`.
    """

    def __init__(
        self,
        selection: Selection | Store,
        batch_size: int,
        *,
        length: int,
        join: Sequence[Tap | str],
        packed: bool = False,
        overflow: Literal["truncate", "split"] = "truncate",
        loss: Literal["all", "prompt", "generated"] | None = None,
        exclude: Literal["first"] | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch: int = 4,
        pin_memory: bool = False,
        checksums: bool = True,
    ) -> None:
        """Args:
        selection, join, shuffle, seed, rank, world_size, prefetch, pin_memory, checksums: as of
            `RowDataset`; all rows of `length` tokens are permuted.
        batch_size: rows of `length` tokens per batch.
        length: tokens per row.
        packed: whether a row has several sequences if they fit; none is divided for this.
        overflow: of a longer sequence: "truncate" reads its first tokens, "split" makes several
            of it.
        loss: which tokens `loss_mask` has; None: as that of `RowDataset`, the assistant's.
        exclude: "first" takes the first token of each prompt out of `loss_mask`.
        drop_last: whether every batch is full; see `RowDataset`.

        Raises:
            StoreError: an argument is malformed or out of range, or no completion has rows of
                consecutive tokens at all taps.
        """
        self.selection = as_selection(selection)
        self.length = check_number("length", length, 1, MAX_POSITION + 1)
        if join is None:
            raise StoreError('join: expected a list such as [("resid_post", 2)], got `None`')
        tokens = Tokens(self.selection, join)
        split = _check_name("overflow", overflow, _OVERFLOWS) == "split"
        sequences = whole_sequences(tokens, self.length, split)
        self.skipped, self.truncated = sequences.skipped, sequences.cut
        rows: list[_Ints] | _Ints = np.arange(len(sequences))[:, None]
        if check_bool("packed", packed):
            rows = pack(sequences.lengths, self.length)
        self.batch_size = check_number("batch_size", batch_size, 1, LARGEST)
        share = Share.read(rank, world_size, drop_last)
        order = EpochOrder(
            items=len(rows),
            batch_size=self.batch_size,
            chunk=1,
            buffer=self.batch_size,
            shuffle=check_bool("shuffle", shuffle),
            seed=check_number("seed", seed, 0, LARGEST),
            rank=share.rank,
            world_size=share.world_size,
            drop_last=share.drop_last,
        )
        source = SequenceSource(
            tokens=tokens,
            sequences=sequences,
            rows=rows,
            length=self.length,
            loss=None if loss is None else _check_name("loss", loss, _LOSSES),
            excludes_first=check_exclude(exclude),
            memory=RowMemory(check_bool("pin_memory", pin_memory)),
            checked=check_bool("checksums", checksums),
        )
        super().__init__(source, order, prefetch)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSource:
    """The rows of a `SequenceDataset` as items of an epoch; see `EpochSource`."""

    tokens: Tokens
    sequences: Sequences
    rows: list[_Ints] | _Ints  # the sequences of each row
    length: int
    loss: str | None
    excludes_first: bool
    memory: RowMemory
    checked: bool
    masks: LossMasks = field(default_factory=LossMasks)

    @property
    def is_mapped(self) -> bool:
        return self.tokens.is_mapped

    def prepare(self, items: _Ints) -> _Ints:
        parts, _ = self._place(items)
        self.tokens.prepare(parts, self.checked)
        return items

    def read(self, window: _Ints, first: int, last: int) -> Columns:
        items = window[first:last]
        parts, numbers = self._place(items)
        size = len(items) * self.length
        values = []
        for bundle in self.tokens.bundles():
            taps, width = self.tokens.width(bundle)
            data = self.memory.empty((size, taps, width))
            # Padding must have bytes that the codec can decode.
            if self.is_mapped:
                self.tokens.locate(parts, bundle, size).copy(0, size, data)
            else:
                rows = data.numpy()
                self.tokens.fetch(parts, bundle, rows, self.checked)
                for gap in padding(parts, size):
                    rows[gap] = rows[0]
            decoded = self.tokens.decode(bundle, data)
            for gap in padding(parts, size):
                decoded[gap] = 0
            values.append(self.memory.hold(decoded.unflatten(0, (len(items), self.length))))
        columns = {
            name: self.memory.hold(torch.from_numpy(column.reshape(len(items), self.length)))
            for name, column in self._columns(parts, numbers, size).items()
        }
        lengths = self.memory.hold(columns["attention_mask"].sum(1))
        return {"values": self.tokens.named(values), **columns, "lengths": lengths}

    def _place(self, items: _Ints) -> tuple[list[TokenPart], list[int]]:
        return place(self.tokens, self.sequences, [self.rows[item] for item in items], self.length)

    def _columns(
        self, parts: Sequence[TokenPart], numbers: Sequence[int], size: int
    ) -> dict[str, NDArray[np.generic]]:
        ids, positions = np.zeros(size, np.int64), np.zeros(size, np.int64)
        index, document = np.full(size, -1), np.full(size, -1)
        loss = np.zeros(size, np.bool_)
        own = 0
        for part, number in zip(parts, numbers, strict=True):
            where = part.where
            assert isinstance(where, slice)
            own = 0 if where.start % self.length == 0 else own + 1
            ids[where] = part.segment.column("token_id", part.at)
            positions[where] = part.segment.column("position", part.at)
            index[where] = part.segment.index(part.at)
            document[where] = own
            if self.loss is None:
                loss[where] = self.masks.of(part.segment, part.at)
                continue
            in_prompt = positions[where] < self.sequences.prompts[number]
            loss[where] = self.loss == "all" or in_prompt == (self.loss == "prompt")
        if self.excludes_first:
            loss &= positions != 0
        return {
            "input_ids": ids,
            "positions": positions,
            "attention_mask": document >= 0,
            "loss_mask": loss,
            "document": document,
            "index": index,
        }


def _check_name(name: str, value: object, known: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in known:
        got = show(value) if isinstance(value, str) else kind(value)
        raise StoreError(f"{name}: expected one of {listed(known)}, got {got}")
    return value
