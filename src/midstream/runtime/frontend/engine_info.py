"""Description of an engine, from its workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from midstream.console import format_ranges
from midstream.errors import UnsupportedError
from midstream.plan import ModelShape
from midstream.runtime.protocol.segments import Room
from midstream.runtime.protocol.worker_info import WorkerInfo
from midstream.runtime.vllm.additional_config import api_process
from midstream.sites import ENDS, NAMES


@dataclass(frozen=True, slots=True)
class FrontEnds:
    """The front ends of one engine: the API server processes of a server, or one."""

    count: int = 1  # each has an equal share of the capacity
    number: int = 0  # of this one

    @classmethod
    def of(cls, vllm_config: Any) -> FrontEnds:
        count, number = api_process(vllm_config.parallel_config)
        return cls(count, max(0, number))

    def room(self, room: Room) -> Room:
        """Return the share of one of them in the tables of a worker."""
        return replace(
            room,
            bank_rows=room.bank_rows // self.count,
            # Of programs and groups the first one is not free.
            programs=1 + (room.programs - 1) // self.count,
            max_edits=room.max_edits // self.count,
            token_ids=room.token_ids // self.count,
            maps=room.maps // self.count,
            gate_states=room.gate_states // self.count,
        )


@dataclass(frozen=True, slots=True, repr=False)
class EngineInfo:
    """Description of one engine."""

    shape: ModelShape
    dtype: str
    codec: str  # of captures that do not name one
    return_: str  # ranks through which rows are transferred if captures do not say
    room: Room  # of a worker for running requests of this front end
    workers: tuple[WorkerInfo, ...]
    front_ends: FrontEnds = FrontEnds()

    def __repr__(self) -> str:
        shape, first = self.shape, self.workers[0]
        sites = sorted({tap[0] for tap in shape.taps}, key=NAMES.index)
        layers = sorted({tap[1] for tap in shape.taps if tap[0] not in ENDS})
        devices = f"{len(self.workers)} workers on {first.device}, runner {first.runner}"
        return (
            f"EngineInfo({shape.num_layers} layers, {shape.hidden_size} wide, {self.dtype}; "
            f"taps: {', '.join(sites)}; layers {format_ranges(layers)}; "
            f"{len(shape.reasons)} sites lacking; codec {self.codec}, return {self.return_}; "
            f"{devices}; {self.room})"
        )


def describe(
    answers: Sequence[Sequence[WorkerInfo]], front_ends: FrontEnds = FrontEnds()
) -> EngineInfo:
    """Return the description of an engine from those of the workers of each replica."""
    workers = tuple(
        msgspec.structs.replace(answer, replica=number)
        for number, replica in enumerate(answers)
        for answer in replica
    )
    lacking = {
        (lack.site, lack.layer): lack.reason for worker in workers for lack in worker.lacking
    }
    taps = frozenset(tap for worker in workers for tap in worker.taps)
    if not taps:
        raise UnsupportedError("no site of any layer is tapped; see midstream's settings")
    first = workers[0]
    rows = [
        row
        for w in workers
        for row in zip(w.taps, w.widths, w.heads, w.routing, w.parts, strict=True)
    ]
    width = first.hidden_size
    widths = {tap: own * parts for tap, own, _, _, parts in rows if own * parts != width}
    heads = {tap: count * parts for tap, _, count, _, parts in rows if count}
    routing = {tap: chosen for tap, _, _, chosen, _ in rows if chosen}
    shape = ModelShape(
        num_layers=first.num_layers,
        hidden_size=width,
        taps=taps,
        reasons=tuple(lacking.items()),
        dtype=first.dtype,
        widths=tuple(widths.items()),
        heads=tuple(heads.items()),
        routing=tuple(routing.items()),
    )
    room = front_ends.room(first.room)
    return EngineInfo(shape, first.dtype, first.codec, first.return_, room, workers, front_ends)
