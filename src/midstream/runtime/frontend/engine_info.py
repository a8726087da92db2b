"""Description of an engine, from its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from midstream.errors import UnsupportedError
from midstream.runtime.protocol.segments import Room
from midstream.runtime.protocol.worker_info import WorkerInfo
from midstream.spec import ModelShape


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Description of one engine.

    Attributes:
        shape: shape of the model, for resolving plans.
        dtype: name of the model's dtype.
        codec: codec of captures that do not name one.
        return_: ranks through which rows are transferred if captures do not say.
        room: capacity of a worker for running requests.
        workers: description of each worker, with the number of its replica.
    """

    shape: ModelShape
    dtype: str
    codec: str
    return_: str
    room: Room
    workers: tuple[WorkerInfo, ...]


def describe(answers: Sequence[Sequence[WorkerInfo]]) -> EngineInfo:
    """Return the description of an engine.

    Args:
        answers: per replica, the descriptions of its workers.

    Raises:
        UnsupportedError: nothing is tapped.
    """
    workers = tuple(
        msgspec.structs.replace(answer, replica=number)
        for number, replica in enumerate(answers)
        for answer in replica
    )
    lacking = {(one.site, one.layer): one.reason for worker in workers for one in worker.lacking}
    taps = frozenset(tap for worker in workers for tap in worker.taps)
    if not taps:
        raise UnsupportedError("no site of any layer is tapped; see midstream's settings")
    first = workers[0]
    shape = ModelShape(
        num_layers=first.num_layers,
        hidden_size=first.hidden_size,
        taps=taps,
        reasons=MappingProxyType(lacking),
        dtype=first.dtype,
        widths={
            tap: width * parts
            for worker in workers
            for tap, width, parts in zip(worker.taps, worker.widths, worker.parts, strict=True)
            if width * parts != first.hidden_size
        },
        heads={
            tap: heads * parts
            for worker in workers
            for tap, heads, parts in zip(worker.taps, worker.heads, worker.parts, strict=True)
            if heads
        },
        routing={
            tap: routing
            for worker in workers
            for tap, routing in zip(worker.taps, worker.routing, strict=True)
            if routing
        },
    )
    return EngineInfo(shape, first.dtype, first.codec, first.return_, first.room, workers)
