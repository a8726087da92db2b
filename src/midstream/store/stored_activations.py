"""Lazily read `Activations` of a stored completion."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from midstream.errors import CodecError, SpecError, StoreError
from midstream.results.activations import Activations
from midstream.results.encoded_rows import Rows
from midstream.results.media_span import MediaSpan, read_spans
from midstream.sites import Tap
from midstream.store.format.entry_rows import check_positions
from midstream.store.format.shard import Run, Shard

# A request's metadata is the caller's, plus midstream's own data under this key. The list of its
# media is in these.
OWN, MEDIA = "midstream", "media"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRows(Rows):
    """Rows of one completion at one tap, stored in a shard."""

    shard: Shard
    run: Run  # the rows of the completion in their group
    tap: Tap

    def __len__(self) -> int:
        return self.run.stop - self.run.start

    def encoded(self) -> Tensor:
        """Return a copy of the encoded rows, uint8 [n, row_bytes]."""
        rows = self.shard.rows(self.run.group, self.tap, self.run.start, self.run.stop)
        if not len(rows):
            # `from_numpy` of an empty array has strides that cannot be viewed as another dtype.
            return torch.empty(rows.shape, dtype=torch.uint8)
        # Copied by NumPy, which allocates huge pages.
        return torch.from_numpy(rows.copy())

    def decoded(self) -> Tensor:
        """Return the decoded rows [n, width]. Raises StoreError if they cannot be decoded."""
        return decode(self.shard, self.tap, self.encoded())


def decode(shard: Shard, tap: Tap, data: Tensor) -> Tensor:
    """Decode rows of a shard, uint8 [n, row_bytes], to [n, width]."""
    header = shard.header
    try:
        return header.open_codec().decode(data, header.width(tap), header.torch_dtype)
    except CodecError as error:
        raise StoreError(f"{shard.path}: {error}") from None


def read_activations(shard: Shard, request: int) -> Activations:
    header = shard.header
    codec, dtype = header.open_codec(), header.torch_dtype
    values: dict[Tap, Tensor | Rows] = {}
    positions: dict[Tap, Tensor] = {}
    places = []
    tokens = []
    for run in shard.runs(request):
        run_positions = shard.column(run.group, "position", run.start, run.stop).copy()
        where = f"group {run.group}, rows {run.start} to {run.stop}"
        check_positions(run_positions, f"{shard.path}: {where}")
        places.append(run_positions)
        tokens.append(shard.column(run.group, "token_id", run.start, run.stop))
        shared = torch.from_numpy(run_positions)
        for tap in shard.groups[run.group].taps:
            positions[tap] = shared
            values[tap] = StoredRows(
                codec=codec,
                hidden=header.width(tap),
                dtype=dtype,
                chunks=(),
                places=(),
                shard=shard,
                run=run,
                tap=tap,
            )
    ordered = shard.taps(request)
    return Activations(
        {tap: values[tap] for tap in ordered},
        {tap: positions[tap] for tap in ordered},
        _by_position(places, tokens),
        positions_of_media=media_of(shard, request),
    )


def media_of(shard: Shard, request: int) -> tuple[MediaSpan, ...]:
    """Return the media in a request's prompt; none if its metadata name none."""
    if f'"{MEDIA}"'.encode() not in shard.metadata_text(request):
        return ()
    own = shard.metadata(request).get(OWN)
    try:
        return read_spans(own.get(MEDIA, [])) if isinstance(own, dict) else ()
    except SpecError as error:
        raise StoreError(f"{shard.path}: metadata: {OWN}: {error}") from None


def _by_position(places: list[np.ndarray], tokens: list[np.ndarray]) -> Tensor:
    """Return token ids by position, int64, 0 where none is; empty pages take no memory."""
    ends = (int(positions[-1]) + 1 for positions in places if len(positions))
    token_ids = np.zeros(max(ends, default=0), np.int64)
    for where, ids in zip(places, tokens, strict=True):
        token_ids[where] = ids
    return torch.from_numpy(token_ids)
