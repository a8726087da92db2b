"""The device buffers that the `site` op works on: allocated once, at one address for ever."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from midstream.ops import layout
from midstream.runtime.protocol.segments import Room
from midstream.sites import Tap


@dataclass(frozen=True, slots=True)
class Buffers:
    """Layouts: `midstream.ops.layout`.

    Attributes:
        tokens: int32 [T, 4], what each row of the next forward asks for.
        ids: int32 [T], the token ids of those rows, where an instruction asks for them.
        tally: int32 [T, 4], what was done for it.
        table: int32 [S, N, 4], per tap: programs' ranges of instructions, groups' places.
        instructions: int32 [E, 8]; params: float32 [E, 4].
        lists: int32 [L], token ids.
        bank: float32 [V, H], the vectors.
        scores: float32 [T, P], what probes read.
        ring: [R, H] in the model's dtype, captured vectors on their way out.
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
        """Zeroed buffers for `taps`, in that order, and steps of up to `max_tokens` rows."""

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
            # The ring is written before it is read: left alone, its pages cost nothing on a CPU.
            ring=torch.empty(ring_rows, hidden_size, dtype=dtype, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        return sum(int(getattr(self, each.name).nbytes) for each in fields(self))


def upload(target: Tensor, values: Tensor) -> None:
    """Copies host values into a device buffer without waiting for what is queued before."""
    if target.is_cuda:
        target.copy_(values.pin_memory(), non_blocking=True)
    else:
        target.copy_(values)


def scatter(target: Tensor, rows: list[int], values: Tensor) -> None:
    """Copies host values into some rows of a device buffer, without waiting, in one transfer."""
    index = torch.tensor(rows, dtype=torch.int64)
    if target.is_cuda:
        index = index.pin_memory().to(target.device, non_blocking=True)
        values = values.pin_memory().to(target.device, non_blocking=True)
    target.index_copy_(0, index, values)


def code(tap: Tap) -> int:
    """A tap's 32-bit code: a token's signature is the sum of the codes of the taps that ran.

    The same on every rank and in every run. A tap that is missing or runs twice changes the sum.
    """
    name = f"{tap[0]}:{tap[1]}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:4], "little", signed=True) | 1
