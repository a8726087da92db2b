"""Rows of a selection that exports write in order: by token, or by whole completion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.errors import StoreError
from midstream.sites import Tap
from midstream.store import Header, RowDataset, Selection, Store
from midstream.store.dataset import TokenSource, check_exclude
from midstream.store.format.entry import check_number
from midstream.store.format.layout import MAX_POSITION
from midstream.store.row_memory import RowMemory
from midstream.store.selection import as_selection
from midstream.store.sequences import whole_sequences
from midstream.store.tokens import Tokens, tap_key

_BATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """Rows of some tokens, in the order of the taps.

    Attributes:
        values: [n, width] of each tap; in the model's dtype for codec raw, float32 for others.
        stacked: the same as [n, taps, width]; None: the taps differ in width.
        token_ids, positions, index: int64 [n]; `index` is that of the first tap's row in the
            selection.
        loss_mask: bool [n].
    """

    values: tuple[Tensor, ...]
    token_ids: Tensor
    positions: Tensor
    index: Tensor
    loss_mask: Tensor
    stacked: Tensor | None

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, count: int) -> TokenRows:
        """Return the first rows."""
        return TokenRows(
            values=tuple(value[:count] for value in self.values),
            token_ids=self.token_ids[:count],
            positions=self.positions[:count],
            index=self.index[:count],
            loss_mask=self.loss_mask[:count],
            stacked=None if self.stacked is None else self.stacked[:count],
        )


class AlignedRows:
    """The rows of a selection, those of a token together.

    Attributes:
        taps: those of `join`; without it all of the selection, by layer.
        widths: of the vectors of each tap.
        header: what the shards of the rows say, which are of one model.
        dtype: that of `TokenRows.values`.
        skipped: tokens, or with `sequences` completions, that are left out as they lack rows.
        cut: tokens beyond the length of `sequences`.
    """

    def __init__(
        self,
        selection: Selection | Store,
        join: Sequence[Tap | str] | None = None,
        length: int | None = None,
        exclude: Literal["first"] | None = None,
    ) -> None:
        """Check the arguments of `export`; StoreError: one is malformed or out of range."""
        self.selection = as_selection(selection)
        if not len(self.selection):
            raise StoreError("no rows to export: the selection is empty")
        self.excludes_first = check_exclude(exclude)
        self.length = None if length is None else check_number("length", length, 1, MAX_POSITION)
        self.tokens = Tokens(self.selection, self.selection.taps if join is None else join)
        assert self.tokens.taps
        self.taps: tuple[Tap, ...] = self.tokens.taps
        self.header = _shared_header(self.tokens)
        codec = self.header.open_codec()
        self.widths: list[int] = []
        for tap in self.taps:
            nothing = torch.zeros(0, self.header.row_bytes(tap), dtype=torch.uint8)
            row = codec.decode(nothing, self.header.width(tap), self.header.torch_dtype)
            self.widths.append(row.shape[1])
            self.dtype = row.dtype
        self.skipped, self.cut = self.tokens.skipped, 0

    @property
    def names(self) -> list[str]:
        """Names of the taps, `resid_post.2`."""
        return [tap_key(tap) for tap in self.taps]

    @property
    def store(self) -> str:
        """Path of the store."""
        return self.tokens.segments[0].shard.path.rpartition("/")[0]

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """That of `as_numpy`: NumPy and Arrow have no bfloat16."""
        return np.dtype(np.float16 if self.dtype == torch.float16 else np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of a token's rows as `as_numpy` returns them."""
        return sum(self.widths) * self.numpy_dtype.itemsize

    def batches(self, multiple: int = 1) -> Iterator[TokenRows]:
        """Yield all tokens in order, some MiB at a time; all but the last a multiple of a number.

        The first token of each prompt is left out if `exclude` says so.
        """
        size = max(_BATCH_BYTES // (self.nbytes * multiple), 1) * multiple
        for batch in RowDataset(
            self.selection,
            size,
            join=self.taps,
            exclude="first" if self.excludes_first else None,
            shuffle=False,
            rank=0,
            world_size=1,
        ):
            yield self._rows(batch)

    def count(self) -> int:
        """Return the number of tokens of `batches`."""
        segments = self.tokens.segments
        if self.excludes_first:
            return sum(int((segment.column("position") != 0).sum()) for segment in segments)
        return sum(map(len, segments))

    def sequences(self) -> Iterator[TokenRows]:
        """Yield each completion whose tokens follow one another, up to `length` of its tokens.

        The first token of each prompt does not count for the loss if `exclude` says so.

        Raises:
            StoreError: there is none.
        """
        whole = whole_sequences(self.tokens, self.length or MAX_POSITION + 1, split=False)
        self.skipped, self.cut = whole.skipped, whole.cut
        source = TokenSource(self.tokens, RowMemory(False), checked=True)
        for start, count in zip(whole.starts.tolist(), whole.lengths.tolist(), strict=True):
            window = source.prepare(np.arange(start, start + count))
            rows = self._rows(source.read(window, 0, count))
            if self.excludes_first:
                rows = replace(rows, loss_mask=rows.loss_mask & (rows.positions != 0))
            yield rows

    def _rows(self, batch: Any) -> TokenRows:
        values = batch["values"]
        parts = values.values() if isinstance(values, dict) else values.unbind(1)
        return TokenRows(
            values=tuple(parts),
            token_ids=batch["token_id"],
            positions=batch["position"],
            index=batch["index"],
            loss_mask=batch["loss_mask"],
            stacked=None if isinstance(values, dict) else values,
        )


def as_numpy(values: Tensor) -> NDArray[Any]:
    """Return vectors as an array, of float32 unless they are float16; no value is rounded."""
    if values.dtype != torch.float16:
        values = values.to(torch.float32)
    return values.contiguous().numpy()


def check_one_width(rows: AlignedRows, form: str) -> None:
    """Raise StoreError if the taps differ in width."""
    if len(set(rows.widths)) > 1:
        listed = ", ".join(f"{name}: {n}" for name, n in zip(rows.names, rows.widths, strict=True))
        raise StoreError(f"join: {form} has vectors of one width, got {listed}")


def _shared_header(tokens: Tokens) -> Header:
    headers = {
        (header.model, header.revision, header.dtype, header.codec): header
        for header in (segment.shard.header for segment in tokens.segments)
    }
    if len(headers) > 1:
        of = "; ".join(", ".join(filter(None, key)) for key in headers)
        raise StoreError(f"the rows are of {of}; select those of one `model` and `codec`")
    return next(iter(headers.values()))
