"""Index of a shard's requests: which rows and which metadata belong to each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.sites import Tap
from midstream.store.format.layout import ALIGNMENT, Layout
from midstream.store.format.lines import Line
from midstream.validation import show


@dataclass(frozen=True, slots=True)
class Run:
    """The rows [start, stop) of a group, which belong to one request."""

    group: int
    start: int
    stop: int


class RequestIndex:
    """Rows and metadata of each request of a shard."""

    def __init__(self, layout: Layout, lines: Sequence[Line]) -> None:
        self._groups = layout.groups
        self.runs: list[tuple[Run, ...]] = []  # of each request, by ascending group
        self.metadata: list[tuple[int, int]] = []  # each request's bytes [start, stop)
        self._assign(layout, lines)
        # By group: (request indices int64 [m], row bounds int64 [m + 1]).
        self.owners = _owners(self.runs, len(layout.groups))

    def _assign(self, layout: Layout, lines: Sequence[Line]) -> None:
        ends = [0] * len(self._groups)
        seen: set[tuple[str, int]] = set()
        text = 0
        for line in lines:
            known = line.request, line.child
            if known in seen:
                raise StoreError(f"request {show(line.request)}: listed twice")
            seen.add(known)
            self.runs.append(tuple(self._next_runs(line, ends)))
            self.metadata.append((text, text + line.metadata_bytes))
            text += line.metadata_bytes
        for number, group in enumerate(self._groups):
            if ends[number] != group.rows:
                raise StoreError(
                    f"group {number}: {group.rows} rows, but the requests list {ends[number]}"
                )
        if not 0 <= layout.metadata_bytes - text < ALIGNMENT:
            raise StoreError(
                f"metadata: {layout.metadata_bytes} bytes, but the requests list {text}"
            )

    def _next_runs(self, line: Line, ends: list[int]) -> Iterator[Run]:
        """Yield a request's runs, and advance the ends of their groups."""
        taps: set[Tap] = set()
        for group, count in line.rows:
            if group >= len(ends):
                raise StoreError(f"request {show(line.request)}: there is no group {group}")
            if not taps.isdisjoint(self._groups[group].taps):
                raise StoreError(f"request {show(line.request)}: a tap has rows in two groups")
            taps.update(self._groups[group].taps)
            yield Run(group, ends[group], ends[group] + count)
            ends[group] += count


def _owners(
    runs: Sequence[Sequence[Run]], groups: int
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Return the requests of each group's rows; see `RequestIndex.owners`."""
    owners: list[list[int]] = [[] for _ in range(groups)]
    bounds: list[list[int]] = [[0] for _ in range(groups)]
    for request, every in enumerate(runs):
        for run in every:
            owners[run.group].append(request)
            bounds[run.group].append(run.stop)
    return [
        (np.array(who, np.int64), np.array(where, np.int64))
        for who, where in zip(owners, bounds, strict=True)
    ]
