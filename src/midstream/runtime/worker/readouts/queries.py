"""Queries of a step whose rows of attention are asked for, and vectors whose logits are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from midstream.codecs import RowEncoding
from midstream.plan.positions.ranges import Ranges
from midstream.runtime.protocol.runs import Ints, within_runs
from midstream.runtime.worker.readouts.logits import LogitQuery
from midstream.runtime.worker.readouts.tiles import QueryRun
from midstream.runtime.worker.request_state import Segment
from midstream.runtime.worker.step.in_flight import PreparedStep
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_plan import CodecBatch, TokenRuns
from midstream.runtime.worker.tables.device_buffers import on_device
from midstream.runtime.worker.tables.pattern_records import PatternEncoding


def queries_of(
    prepared: PreparedStep, batch: CodecBatch, slots: SlotTable, device: torch.device
) -> tuple[Tensor, list[QueryRun]]:
    """Return the position of each record of a batch, int64 [n], and the runs of its records."""
    plan, step = prepared.plan.runs, prepared.batch
    rows, length = plan.row[batch.runs], plan.length[batch.runs]
    position = plan.position[batch.runs]
    # Rows of a request follow those of the request before it.
    request = np.searchsorted(np.cumsum(step.scheduled), rows, side="right")
    lowest = position
    if not plan.exact and step.unknown is not None:
        lowest = np.maximum(position - step.unknown.slack()[request], 0)
        every = np.repeat(rows, length) + within_runs(length)
        positions = step.unknown.positions()[on_device(torch.from_numpy(every), device)].long()
    else:
        known = np.repeat(position, length) + within_runs(length)
        positions = on_device(torch.from_numpy(known), device)
    record = np.cumsum(length) - length
    runs = [
        QueryRun(
            request=int(request[index]),
            record=int(record[index]),
            length=int(length[index]),
            lowest=int(lowest[index]),
            position=int(position[index]),
            keys=tuple(read.pattern.keys for read in segment.patterns),
        )
        for index, segment in enumerate(_segments(plan, batch, slots))
    ]
    return positions, runs


def logits_of(
    prepared: PreparedStep, encoding: Callable[[int], RowEncoding], slots: SlotTable, unit: int
) -> list[LogitQuery]:
    """Return the records of a step whose logits are asked for, also those that are not returned."""
    plan = prepared.plan.runs
    queries = []
    for batch in prepared.plan.batches:
        how = encoding(batch.codec)
        if not isinstance(how, PatternEncoding) or not any(
            pattern.of_logits for pattern in how.patterns
        ):
            continue
        length, within = batch.length, within_runs(batch.length)
        rows = np.repeat(plan.row[batch.runs], length) + within
        units = np.repeat(plan.record[batch.runs], length) + within * how.units
        segments = list(_segments(plan, batch, slots))
        tokens: dict[tuple[Ranges, ...], Ints] = {}  # the layers of a lens have the same
        for index, columns in enumerate(how.patterns):
            if not columns.of_logits:
                continue
            keys: tuple[Ranges, ...] = ()
            if columns.kind in ("logits_of", "lens"):
                keys = tuple([segment.patterns[index].pattern.keys for segment in segments])
            if keys not in tokens:
                tokens[keys] = _tokens(keys, length)
            begin = columns.start // unit
            query = LogitQuery(batch.codec, index, columns, rows, units + begin, tokens[keys])
            queries.append(query)
    return queries


def _tokens(keys: Sequence[Ranges], length: Ints) -> Ints:
    """Return each record's tokens, int64 [n, tokens], from the ranges and length of each run."""
    if not keys:
        return np.zeros((int(length.sum()), 0), np.int64)
    tokens = [
        [token for first, stop in ranges for token in range(first, stop or 0)] for ranges in keys
    ]
    return np.repeat(np.array(tokens, np.int64), length, axis=0)


def _segments(plan: TokenRuns, batch: CodecBatch, slots: SlotTable) -> Iterable[Segment]:
    position = plan.position[batch.runs]
    for index, slot in enumerate(plan.slot[batch.runs].tolist()):
        asked = slots.by_slot(slot)
        assert asked is not None
        (segment,) = asked.segments_within(int(position[index]), int(position[index]) + 1)
        yield segment
