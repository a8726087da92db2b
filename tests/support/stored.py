"""Captured rows in an arena, as the captured row index returns them."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from midstream.codecs import Raw, RowEncoding
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.runs import joined
from midstream.runtime.protocol.segments import Room
from midstream.runtime.protocol.worker_info import WorkerInfo
from midstream.runtime.worker.result_buffer import ResultBuffer
from midstream.runtime.worker.row_block import RecordRun, RowBlock
from midstream.runtime.worker.row_index import ArenaRows, ScoreRows
from midstream.transport.arena import Arena, ArenaSettings
from midstream.transport.base import HostScores
from midstream.transport.leases import Address
from midstream.transport.ring_copy import CpuShipment

TALLY = torch.zeros(0, 4, dtype=torch.int32)
NO_SCORES = HostScores(torch.zeros(0, 3), 0, 0)


SEGMENT = 4096


def make_arena(budget: int = 1 << 30, overflow: str = "block", folder: str = "/tmp") -> Arena:
    """An arena of small segments."""
    return Arena(ArenaSettings(budget, SEGMENT, overflow, Path(folder)), pin=False)


def check_idle(arena: Arena) -> None:
    """Assert that no segment has users, beside the arena itself; all leases have ended then."""
    arena.sweep()
    arena._leave_current()
    assert all(segment.users == 0 for segment in arena._segments.values()), arena.used
    assert not arena.used["leases"]


@functools.cache
def _shared() -> Arena:
    return make_arena()


def stored(values: Tensor, arena: Arena | None = None) -> ArenaRows:
    """[rows, width] of any dtype, in an arena; a worker's are all in one."""
    arena = arena or _shared()
    encoded = Raw().encode(values)
    extent = arena.take(encoded.numel())
    assert extent is not None
    extent.memory.view(encoded.shape).copy_(encoded)
    shipment = CpuShipment((extent,), TALLY, NO_SCORES)
    return ArenaRows(shipment, extent, encoded.shape[1], arena)


def rows_block(
    taps: tuple[int, ...], positions: Sequence[int], values: Tensor, arena: Arena | None = None
) -> RowBlock[ArenaRows]:
    """A block of [positions, taps, width], in one piece."""
    source = stored(values.reshape(-1, values.shape[-1]), arena)
    return _block(taps, positions, source)


def score_rows(positions: Sequence[int], values: Tensor) -> ScoreRows:
    """Scores, [positions, slots]."""
    return ScoreRows(joined([(int(position), 1) for position in positions]), values.numpy())


def worker_info(**fields) -> WorkerInfo:
    """A worker's description with some fields; the others have small values."""
    values = {
        "stage": 0,
        "tensor_rank": 0,
        "tensor_ranks": 1,
        "num_layers": 2,
        "hidden_size": 4,
        "taps": (),
        "lacking": (),
        "dtype": "float32",
        "capture_limit": 8,
        "step_tokens": 16,
        "buffer_bytes": 0,
        "room": Room(bank_rows=1, programs=1, max_edits=1, token_ids=1, probes=1),
        "edits_per_site": 1,
        "runner": "v2",
        "codec": "raw",
        "return_": "gathered",
        "arena": Address(0, 0, ""),
        "arena_bytes": 0,
        "device": "cpu",
    }
    found = {**values, **fields}
    found.setdefault("widths", (found["hidden_size"],) * len(found["taps"]))
    found.setdefault("parts", (1,) * len(found["taps"]))
    found.setdefault("heads", (0,) * len(found["taps"]))
    found.setdefault("routing", (0,) * len(found["taps"]))
    return WorkerInfo(**found)


def unmapped(stage: int = 0, tensor_rank: int = 0) -> RemoteWorker:
    """A worker whose memory cannot be mapped."""
    return RemoteWorker(worker_info(stage=stage, tensor_rank=tensor_rank))


def outbox_of() -> ResultBuffer:
    """An outbox of raw rows."""
    return ResultBuffer(make_arena(), lambda _: RowEncoding.of(Raw(), (), 4))


def put_one(outbox: ResultBuffer, name: str, requests, mapped: bool, front_end: int = 0):
    """Put requests under one name; return the header."""
    (header,) = outbox.put({name: requests}, mapped, front_end=front_end)
    return header


def _block(taps, positions, source):
    runs = []
    first = 0
    for position, length in runs_of(np.array(positions)):
        runs.append(RecordRun(position, length, 0, first))
        first += length * len(taps)
    return RowBlock(taps, 0, len(taps), [source], runs)


def runs_of(positions):
    """Return ascending positions as (first, length) runs."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(run[0]), int(run.size)) for run in np.split(positions, breaks) if run.size]
