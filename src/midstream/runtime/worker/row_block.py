"""Captured rows of one request, where they are: runs of records in the results of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from midstream.runtime.protocol.runs import Ints, expand_runs, joined


class RowSource(Protocol):
    """Rows of one step."""

    def rows(self) -> Tensor:
        """Return the rows on the host, [rows, width]. Blocks until their copy is complete."""
        ...

    def free(self) -> None:
        """Release the rows, as the index has no entry for them any more. Called once."""


R = TypeVar("R", bound=RowSource)


class RecordRun(NamedTuple):
    """Records contiguous in their source, from its row `first` on, at consecutive positions."""

    position: int
    length: int
    source: int
    first: int


@dataclass(slots=True)  # not frozen, as frozen instances take longer to make, for each request
class RowBlock(Generic[R]):
    """One request's rows of one kind of record, which are not copied."""

    taps: tuple[int, ...]  # of each record, in order, as indices on this rank
    codec: int  # number of the rows' encoding
    rows: int  # of a record in its source; see `RowEncoding` for what a row is
    sources: list[R]
    runs: list[RecordRun]  # positions ascend, and no two records have the same

    @property
    def size(self) -> int:
        if len(self.runs) == 1:
            return self.runs[0].length
        return sum([length for _, length, _, _ in self.runs])

    @property
    def stop(self) -> int:
        """Position of the last record + 1."""
        position, length, _, _ = self.runs[-1]
        return position + length

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The positions as (first, length), adjacent runs as one."""
        if len(self.runs) == 1:
            position, length, _, _ = self.runs[0]
            return [(position, length)]
        return joined([(position, length) for position, length, _, _ in self.runs])

    @property
    def positions(self) -> Ints:
        """Position of each record, int64 [size]."""
        return expand_runs(self.spans)

    @property
    def values(self) -> Tensor:
        """A copy of the rows, [size, `rows`, width]. Blocks until the rows are on the host."""
        # NumPy slices and joins many short parts in a fifth of the time that PyTorch takes.
        parts = [
            self.sources[source].rows().numpy()[first : first + self.rows * records]
            for _, records, source, first in self.runs
        ]
        return torch.from_numpy(np.concatenate(parts)).view(self.size, self.rows, -1)

    def since(self, position: int) -> RowBlock[R]:
        if not self.runs or position <= self.runs[0].position:
            return self
        left = []
        for run in self.runs:
            cut = max(position - run.position, 0)
            if cut < run.length:
                at = run.position + cut, run.length - cut, run.source, run.first + cut * self.rows
                left.append(RecordRun(*at))
        return RowBlock(self.taps, self.codec, self.rows, self.sources, left)
