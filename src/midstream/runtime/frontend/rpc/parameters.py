"""Exchange with the workers that reads a parameter of the model."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from midstream.errors import BusyError, FetchError, SpecError
from midstream.runtime.frontend.rpc.fetch import READ_BYTES, Exchange
from midstream.runtime.frontend.rpc.rpc_batcher import RpcBatcher
from midstream.runtime.protocol.rpc import ParameterRows, ReadParameter
from midstream.validation import show


async def fetch_parameter(engine: Any, batcher: RpcBatcher, name: str) -> Tensor:
    """Return a parameter of an asynchronous engine, of any replica; see `read_parameter`."""
    check_awake(await engine.is_sleeping())
    return await batcher.carry_out(read_parameter(name))


def check_awake(is_sleeping: bool) -> None:
    """Check that an engine has its weights on the device."""
    if is_sleeping:
        raise BusyError("the engine sleeps, without its weights on the device; wake it up first", 5)


def read_parameter(name: str) -> Exchange[Tensor]:
    """Read a parameter outside the decoder layers to the CPU, from the ranks that have parts."""
    answers: list[ParameterRows] = yield ReadParameter(name, 0, 0)
    known = next((answer for answer in answers if answer.shape), None)
    if known is None:
        names = sorted({parameter for answer in answers for parameter in answer.names})
        raise SpecError(
            "name",
            f"there is no parameter {show(name)} outside the decoder layers; expected one of "
            f"{', '.join(names)}",
        )
    if known.problem:
        raise SpecError("name", f"{name} cannot be read: {known.problem}")
    dtype = getattr(torch, known.dtype)
    whole = torch.empty(known.shape, dtype=dtype)
    most = max(1, READ_BYTES // (math.prod(known.shape[1:]) * dtype.itemsize))
    for first in range(0, known.shape[0], most):
        part = whole[first : first + most]
        is_missing = torch.ones(part.shape[0], dtype=torch.bool)
        pieces: list[ParameterRows] = yield ReadParameter(name, first, part.shape[0])
        for piece in pieces:
            if piece.data:
                rows = torch.frombuffer(bytearray(piece.data), dtype=dtype).view(
                    -1, *part.shape[1:]
                )
                at = slice(piece.first - first, piece.first - first + rows.shape[0])
                part[at], is_missing[at] = rows, False
        if is_missing.any():
            raise FetchError(f"no worker has row {first + int(is_missing.nonzero()[0])} of {name}")
    return whole
