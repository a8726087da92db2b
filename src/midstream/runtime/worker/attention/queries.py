"""Queries of a step whose rows of attention are asked for."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from midstream.runtime.protocol.runs import within_runs
from midstream.runtime.worker.attention.query_run import QueryRun
from midstream.runtime.worker.step.in_flight import PreparedStep
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_plan import CodecBatch
from midstream.runtime.worker.tables.device_buffers import on_device


def queries_of(
    prepared: PreparedStep, batch: CodecBatch, slots: SlotTable, device: torch.device
) -> tuple[Tensor, list[QueryRun]]:
    """Return the position of each record of a batch, int64 [n], and the runs of its records.

    Args:
        prepared: the step.
        batch: records of the step whose encoding has rows of attention.
        slots: the requests.
        device: where the positions are needed.
    """
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
    runs = []
    for nth, slot in enumerate(plan.slot[batch.runs].tolist()):
        asked = slots.by_slot(slot)
        assert asked is not None
        (segment,) = asked.segments_within(int(position[nth]), int(position[nth]) + 1)
        runs.append(
            QueryRun(
                request=int(request[nth]),
                record=int(record[nth]),
                length=int(length[nth]),
                lowest=int(lowest[nth]),
                position=int(position[nth]),
                keys=tuple(read.pattern.keys for read in segment.patterns),
            )
        )
    return positions, runs
