"""What the front end knows of its engine's workers."""

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
    """What the workers of one engine said of themselves.

    Attributes:
        shape: for resolving plans.
        dtype: name of the model's dtype.
        codec: how captured vectors leave the device where a request does not say.
        return_: through which ranks.
        room: how much the running requests can hold together.
        workers: each worker's own description, with the number of its replica.
    """

    shape: ModelShape
    dtype: str
    codec: str
    return_: str
    room: Room
    workers: tuple[WorkerInfo, ...]


def describe(answers: Sequence[Sequence[WorkerInfo]]) -> EngineInfo:
    """The engine, from its workers' answers to `describe`.

    Args:
        answers: per replica, those of its workers.

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
    )
    return EngineInfo(shape, first.dtype, first.codec, first.return_, first.room, workers)
