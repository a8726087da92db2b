"""Rows of attention of a step in parts that are computed together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.plan.positions.ranges import Ranges
from midstream.runtime.worker.readouts import weights as op
from midstream.runtime.worker.tables.device_buffers import on_device


@dataclass(frozen=True, slots=True)
class QueryRun:
    """Consecutive rows of one request, in consecutive records."""

    request: int  # index of the request in the batch
    record: int  # index of the first record
    length: int
    lowest: int  # position of the first row, or a lower bound
    position: int  # or an upper bound
    keys: tuple[Ranges, ...]  # for each `PatternColumns`, the positions of a mass


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Rows that are computed together: several runs of one row, or some rows of one run."""

    runs: Sequence[QueryRun]
    at: Tensor | slice  # their records, as an index of those of the step
    positions: Tensor  # int64 [runs, rows]
    requests: Tensor  # int64 [runs], index of each one's request in the batch
    begin: int  # position of the first key that the rows see
    stop: int  # position of the last + 1
    chosen: dict[tuple[int, tuple[Ranges, ...]], Tensor]  # `chosen_keys` by stop, ranges

    @classmethod
    def of(cls, runs: Sequence[QueryRun], window: int, positions: Tensor) -> Tile:
        device, first = positions.device, runs[0]
        at: Tensor | slice = slice(first.record, first.record + first.length)
        if len(runs) > 1:
            at = on_device(torch.tensor([run.record for run in runs]), device)
        requests = on_device(torch.tensor([run.request for run in runs]), device)
        tile_positions = positions[at].view(len(runs), -1)
        return cls(runs, at, tile_positions, requests, *_span(runs, window), {})

    def keys_of_mass(self, index: int, stop: int) -> Tensor:
        """Return the keys [begin, stop) of the pattern's mass, by its number."""
        ranges = tuple(run.keys[index] for run in self.runs)
        key = stop, ranges
        if key not in self.chosen:
            device = self.positions.device
            self.chosen[key] = on_device(op.chosen_keys(ranges, self.begin, stop), device)
        return self.chosen[key]


class Tiles:
    """The tiles of a step's records, whose positions are int64 [n]; see `_batches`."""

    def __init__(self, runs: Sequence[QueryRun], positions: Tensor, workspace: int) -> None:
        self._runs = runs
        self._positions = positions
        self._workspace = workspace
        self._known: dict[tuple[int, int], list[Tile]] = {}

    def of(self, heads: int, window: int) -> list[Tile]:
        tiles = self._known.get((heads, window))
        if tiles is None:
            batches = _batches(self._runs, heads, window, self._workspace)
            tiles = [Tile.of(some, window, self._positions) for some in batches]
            self._known[heads, window] = tiles
        return tiles


def most_cells(workspace: int, heads: int) -> int:
    """Return how many pairs of row and key may be computed at a time in half of the workspace."""
    # The products, what a softmax makes of them, and the distances.
    return workspace // 2 // (4 * heads * 3)


def _span(runs: Sequence[QueryRun], window: int) -> tuple[int, int]:
    """Return the first position of a key that a row of the runs sees, and the last + 1."""
    begin = max(0, min(run.lowest for run in runs) - window + 1) if window else 0
    return begin, max(run.position + run.length for run in runs)


def _batches(
    runs: Sequence[QueryRun], heads: int, window: int, workspace: int
) -> list[list[QueryRun]]:
    """Return runs in groups, of one row or a part of one run, that half of the workspace holds."""
    limit = most_cells(workspace, heads)
    groups: list[list[QueryRun]] = []
    single: list[QueryRun] = []
    for run in sorted(runs, key=lambda run: run.position):
        if run.length == 1:
            begin, stop = _span([*single, run], window)
            if single and (len(single) + 1) * (stop - begin) > limit:
                groups.append(single)
                single = []
            single.append(run)
            continue
        begin, stop = _span([run], window)
        rows = max(1, limit // (stop - begin))
        for first in range(0, run.length, rows):
            count = min(rows, run.length - first)
            groups.append(
                [
                    QueryRun(
                        run.request,
                        run.record + first,
                        count,
                        run.lowest + first,
                        run.position + first,
                        run.keys,
                    )
                ]
            )
    return [*groups, single] if single else groups
