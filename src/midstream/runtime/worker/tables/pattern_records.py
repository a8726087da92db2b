"""Encoding of records that have rows of attention beside captured vectors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.codecs import RowEncoding
from midstream.plan.resolved import ON_DEVICE, REDUCING, LensMap, PatternKind, SaeEncoder


@dataclass(frozen=True, slots=True)
class PatternColumns:
    """Queries in a record, and the row or score made of them; by content, to share encodings."""

    capture: int  # index of the plan's; −1 for a score
    place: int  # index of the tap in the capture
    tap: int  # of the queries, as an index on this rank
    start: int  # first number of the queries in a record
    width: int  # numbers of the queries
    kind: PatternKind  # see `Pattern`, as for `size`
    size: int
    heads: tuple[int, ...]  # empty: all of this rank
    count: int  # number of heads that are computed
    is_row: bool = True
    slot: int | None = None  # column of a score, which is not in the encoded row
    divisor: int = 1  # of a score, the number of heads over all ranks
    # Of a lens, and of logits of the stream; None: what is read is an output of the final norm.
    map: LensMap | None = None
    encoder: SaeEncoder | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a row in the encoded record."""
        return 4 * self.count * self.size if self.is_row else 0

    @property
    def of_logits(self) -> bool:
        return self.kind == "lens" or self.kind.startswith("logits")


@dataclass(frozen=True, slots=True)
class PatternEncoding(RowEncoding):
    """Encodes a record's vectors, (first number, width), by the codec, then rows of attention."""

    vectors: tuple[tuple[int, int], ...] = ()
    patterns: tuple[PatternColumns, ...] = ()

    @property
    def has_scores(self) -> bool:
        return any(pattern.slot is not None for pattern in self.patterns)

    @property
    def has_sums(self) -> bool:
        """Whether vectors of a record are counted in sums."""
        return any(pattern.kind in REDUCING for pattern in self.patterns)

    @property
    def leaves_rows(self) -> bool:
        """Whether vectors of a record stay on the device."""
        return any(pattern.kind == ON_DEVICE for pattern in self.patterns)

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of an encoded record; 0: this rank returns nothing of it."""
        captured = sum(self.codec.row_bytes(width, dtype) for _, width in self.vectors)
        return captured + sum(pattern.nbytes for pattern in self.patterns)

    def encode_vectors(self, records: Tensor, out: Tensor) -> int:
        """Encode the vectors of [n, numbers] records into `out`; return how many columns."""
        end = 0
        for start, width in self.vectors:
            encoded = self.codec.encode(records[:, start : start + width].contiguous())
            out[:, end : end + encoded.shape[1]] = encoded
            end += encoded.shape[1]
        return end
