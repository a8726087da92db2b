"""Scores on their way to the front end while their requests go on: question, answer, reading."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.runtime.protocol.results import expand
from midstream.runtime.protocol.runs import runs_of
from midstream.runtime.worker.request_state import RequestState
from midstream.runtime.worker.row_index import RowBlock, Scores

Span = tuple[int, int]
_ITEM = 4  # bytes of a float32


class ScoreBlock(NamedTuple):
    """What one worker has of a request's scores.

    Attributes:
        worker: the worker's own description.
        positions: int64 [n], ascending.
        values: float32 [n, slots].
    """

    worker: dict[str, Any]
    positions: NDArray[np.int64]
    values: Tensor


def read(argument: str) -> dict[str, Span]:
    """Per uid, [start, stop) of the positions that are asked for."""
    return {uid: (start, stop) for uid, (start, stop) in json.loads(argument).items()}


def pack(found: Mapping[str, tuple[RequestState, RowBlock[Scores]]]) -> dict[str, Any]:
    """A worker's answer: in JSON per uid its runs of positions and how many slots; and the scores,
    float32 [positions, slots], of one uid after the other.
    """
    headers = []
    parts = []
    for uid, (request, block) in found.items():
        slots = request.plan.slots
        headers.append([uid, slots, runs_of(block.positions)])
        parts.append(block.values[:, 0, :slots].contiguous().numpy().tobytes())
    return {"json": json.dumps(headers), "data": b"".join(parts)}


def unpack(
    workers: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]
) -> dict[str, list[ScoreBlock]]:
    """Per uid what each worker has of it; workers that have nothing are left out."""
    found: dict[str, list[ScoreBlock]] = {}
    for worker, answer in zip(workers, answers, strict=True):
        data, offset = answer["data"], 0
        for uid, slots, runs in json.loads(answer["json"]):
            positions = expand((first, first + length) for first, length in runs)
            size = positions.size * slots * _ITEM
            values = np.frombuffer(data, np.float32, positions.size * slots, offset).copy()
            offset += size
            scores = torch.from_numpy(values).view(positions.size, slots)
            found.setdefault(uid, []).append(ScoreBlock(worker, positions, scores))
    return found
