"""Device buffers of the `site` op: allocated once, and never moved."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from midstream.ops import layout
from midstream.runtime.protocol.segments import Room
from midstream.sites import Tap


@dataclass(frozen=True, eq=False)
class Buffers:
    """Device buffers of one rank; see `midstream.ops.layout` for the columns.

    Attributes:
        tokens: int32 [T, 4], program, group, record and position of each row of the next forward
            pass.
        ids: int32 [T], token id of each row; set in steps in which an instruction reads it.
        tally: int32 [T, 4], counts of the work done for each row.
        table: int32 [S, N, 4], for each tap the programs' ranges of instructions and the groups'
            places.
        instructions: int32 [E, 8], the programs' instructions.
        params: float32 [E, 4], parameters of the instructions.
        lists: int32 [L], token ids of the instructions.
        bank: float32 [V, H], the vectors.
        scores: float32 [T, P], probe scores.
        ring: [R, H] in the model's dtype, captured vectors until they are copied to the host.
    """

    tokens: Tensor
    ids: Tensor
    tally: Tensor
    table: Tensor
    instructions: Tensor
    params: Tensor
    lists: Tensor
    bank: Tensor
    scores: Tensor
    ring: Tensor

    @staticmethod
    def allocate(
        *,
        taps: list[Tap],
        max_tokens: int,
        hidden_size: int,
        room: Room,
        ring_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Buffers:
        """Return zeroed buffers.

        Args:
            taps: the rank's taps, in the order of their indices.
            max_tokens: most rows of a forward pass, padding included.
            hidden_size: width of the residual stream.
            room: limits of the tables.
            ring_rows: rows of the ring.
            dtype: the model's dtype.
            device: the rank's device.
        """

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        int32, float32 = torch.int32, torch.float32
        table = zeros(int32, len(taps), room.programs, layout.TABLE_COLUMNS)
        codes = torch.tensor([code(tap) for tap in taps], dtype=torch.int32)
        table[:, 0, layout.CODE] = codes.to(device)
        return Buffers(
            tokens=zeros(int32, max_tokens, layout.TOKEN_COLUMNS),
            ids=zeros(int32, max_tokens),
            tally=zeros(int32, max_tokens, layout.TALLY_COLUMNS),
            table=table,
            instructions=zeros(int32, room.max_edits, layout.INSTRUCTION_COLUMNS),
            params=zeros(float32, room.max_edits, layout.PARAM_COLUMNS),
            lists=zeros(int32, room.token_ids),
            bank=zeros(float32, room.bank_rows, hidden_size),
            scores=zeros(float32, max_tokens, room.probes),
            # The ring is written before it is read. On a CPU, pages never written take no memory.
            ring=torch.empty(ring_rows, hidden_size, dtype=dtype, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return sum(int(getattr(self, each.name).nbytes) for each in fields(self))


def upload(target: Tensor, values: Tensor) -> None:
    """Copy host values into a device buffer, without waiting for queued work."""
    if target.is_cuda:
        target.copy_(values.pin_memory(), non_blocking=True)
    else:
        target.copy_(values)


def scatter(target: Tensor, rows: list[int], values: Tensor) -> None:
    """Copy host values into some rows of a device buffer in one transfer, without waiting."""
    index = torch.tensor(rows, dtype=torch.int64)
    if target.is_cuda:
        index = index.pin_memory().to(target.device, non_blocking=True)
        values = values.pin_memory().to(target.device, non_blocking=True)
    target.index_copy_(0, index, values)


def code(tap: Tap) -> int:
    """Return the 32-bit code of a tap, the same on every rank and in every run.

    A token's signature is the sum of the codes of the taps that ran. A tap that is missing or runs
    twice changes the sum.
    """
    name = f"{tap[0]}:{tap[1]}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:4], "little", signed=True) | 1
