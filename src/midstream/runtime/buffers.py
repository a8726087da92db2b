"""The device buffers that the `site` op works on: allocated once, at one address for ever."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.ops import layout

Tap = tuple[str, int]  # (site, layer)


@dataclass(frozen=True, slots=True)
class Buffers:
    """Layouts: `midstream.ops.layout`.

    Attributes:
        tokens: int32 [T, 4], what each row of the next forward asks for.
        tally: int32 [T, 4], what was done for it.
        table: int32 [S, N, 4], per tap: programs' ranges of edits, groups' places.
        edit_rows: int32 [E]; edit_scales: float32 [E].
        bank: float32 [V, H], the vectors.
        ring: [R, H] in the model's dtype, captured vectors on their way out.
    """

    tokens: Tensor
    tally: Tensor
    table: Tensor
    edit_rows: Tensor
    edit_scales: Tensor
    bank: Tensor
    ring: Tensor

    @staticmethod
    def allocate(
        *,
        taps: list[Tap],
        max_tokens: int,
        hidden_size: int,
        table_rows: int,
        max_edits: int,
        bank_rows: int,
        ring_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Buffers:
        """Zeroed buffers for `taps`, in that order, and steps of up to `max_tokens` rows."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        int32, float32 = torch.int32, torch.float32
        table = zeros(int32, len(taps), table_rows, layout.TABLE_COLUMNS)
        codes = torch.tensor([code(tap) for tap in taps], dtype=torch.int32)
        table[:, 0, layout.CODE] = codes.to(device)
        return Buffers(
            tokens=zeros(int32, max_tokens, layout.TOKEN_COLUMNS),
            tally=zeros(int32, max_tokens, layout.TALLY_COLUMNS),
            table=table,
            edit_rows=zeros(int32, max_edits),
            edit_scales=zeros(float32, max_edits),
            bank=zeros(float32, bank_rows, hidden_size),
            # The ring is written before it is read: left alone, its pages cost nothing on a CPU.
            ring=torch.empty(ring_rows, hidden_size, dtype=dtype, device=device),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of device memory held."""
        held = (
            self.tokens, self.tally, self.table, self.edit_rows,
            self.edit_scales, self.bank, self.ring,
        )  # fmt: skip
        return sum(buffer.nbytes for buffer in held)


def upload(target: Tensor, values: Tensor) -> None:
    """Copies host values into a device buffer without waiting for what is queued before."""
    if target.is_cuda:
        target.copy_(values.pin_memory(), non_blocking=True)
    else:
        target.copy_(values)


def code(tap: Tap) -> int:
    """A tap's 32-bit code: a token's signature is the sum of the codes of the taps that ran.

    The same on every rank and in every run. A tap that is missing or runs twice changes the sum.
    """
    name = f"{tap[0]}:{tap[1]}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:4], "little", signed=True) | 1
