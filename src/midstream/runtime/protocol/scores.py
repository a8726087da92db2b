"""Probe scores of running requests, from a worker to the front end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from midstream.errors import MessageError
from midstream.runtime.protocol.codec import Natural, ProtocolMessage, Runs
from midstream.runtime.protocol.runs import Floats, Ints, count_of, expand_runs
from midstream.runtime.protocol.worker_info import WorkerInfo

Span = tuple[int, int]
_ITEM = 4  # bytes of a float32


class RequestScores(ProtocolMessage, frozen=True, array_like=True):
    """Scores of one running request, `slots` for each position."""

    uid: str
    slots: Natural
    runs: Runs


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """Scores of a request from one worker."""

    worker: WorkerInfo
    positions: Ints  # ascending
    values: Floats  # [positions, slots]


def score_blocks(
    worker: WorkerInfo, requests: Sequence[RequestScores], data: bytes
) -> Iterable[tuple[str, ScoreBlock]]:
    """Yield each request's uid and scores, of float32 [positions, slots] one after the other."""
    described = _ITEM * sum(count_of(header.runs) * header.slots for header in requests)
    if described != len(data):
        raise MessageError(
            f"worker {worker.place} sent {len(data)} bytes of scores and described {described}"
        )
    offset = 0
    for request in requests:
        positions = expand_runs(request.runs)
        size = positions.size * request.slots
        values = np.frombuffer(data, np.float32, size, offset)
        offset += size * _ITEM
        values = values.reshape(positions.size, request.slots)
        yield request.uid, ScoreBlock(worker, positions, values)
