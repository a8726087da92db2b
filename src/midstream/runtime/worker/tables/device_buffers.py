"""Device buffers of the `site` op: allocated once, and never moved."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from midstream.ops import layout
from midstream.ops.sae.reference import SaeBuffers
from midstream.ops.site import SiteBuffers
from midstream.runtime.protocol.segments import Room
from midstream.sites import Tap


@dataclass(frozen=True)
class BufferSizes:
    """How large a rank's buffers are."""

    max_tokens: int  # most rows of a forward pass, padding included
    hidden_size: int
    room: Room
    ring_rows: int  # vectors of the hidden size for which the ring has room
    drafts: int = 0  # most draft tokens of a request in a step
    doses: int = 0  # of the edits of a token


@dataclass(eq=False, kw_only=True)
class Buffers(SiteBuffers):
    """Device buffers of one rank."""

    table: Tensor  # int32 [S, N, 4], for each tap the programs' ranges and the groups' places
    units: tuple[int, ...]  # of each tap's vectors; every width is a multiple of U
    switches: Tensor  # float32 [T, n], see `LogitBias`; no row where logits are not tapped

    @staticmethod
    def allocate(
        taps: Mapping[Tap, int],
        sizes: BufferSizes,
        *,
        dtype: torch.dtype,
        device: torch.device,
        sae: SaeBuffers | None = None,
        reconstructed: Collection[Tap] = (),
    ) -> Buffers:
        """Return zeroed buffers for taps in the order of their indices, with their widths."""
        room, max_tokens, hidden_size = sizes.room, sizes.max_tokens, sizes.hidden_size

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        int32, float32 = torch.int32, torch.float32
        switches = next((width for tap, width in taps.items() if tap[0] == "logits"), 0)
        is_mapping = room.maps > 0 and device.type == "cuda"
        unit = math.gcd(hidden_size, *taps.values())
        units_of_row = hidden_size // unit
        # A power of 2. A step adds a state for each draft; the next may start before all of them.
        kept = 1 << (sizes.drafts + 2).bit_length()
        table = zeros(int32, len(taps), room.programs, layout.TABLE_COLUMNS)
        codes = torch.tensor([code(tap) for tap in taps], dtype=torch.int32)
        table[:, 0, layout.CODE] = codes.to(device)
        return Buffers(
            tokens=zeros(int32, max_tokens, layout.TOKEN_COLUMNS),
            ids=zeros(int32, max_tokens, layout.ID_COLUMNS),
            tally=zeros(int32, max_tokens, layout.TALLY_COLUMNS + sizes.doses),
            table=table,
            instructions=zeros(int32, room.max_edits, layout.INSTRUCTION_COLUMNS),
            params=zeros(float32, room.max_edits, layout.PARAM_COLUMNS),
            lists=zeros(int32, room.token_ids),
            bank=zeros(float32, (room.bank_rows + room.maps * hidden_size) * units_of_row, unit),
            scores=zeros(
                float32, max_tokens, room.probes + layout.MEMORY_COLUMNS * room.gate_states
            ),
            # The ring is written before it is read. On a CPU, pages never written take no memory.
            ring=torch.empty(sizes.ring_rows * units_of_row, unit, dtype=dtype, device=device),
            units=tuple(width // unit for width in taps.values()),
            switches=zeros(float32, max_tokens if switches else 0, max(1, switches)),
            mapped=zeros(float32, max_tokens if is_mapping else 0, hidden_size),
            scans=zeros(int32, room.gate_states, layout.SCAN_COLUMNS),
            scan_states=zeros(int32, room.gate_states, kept, layout.STATE_COLUMNS),
            sae=sae,
            encoding=frozenset(
                table[index].data_ptr() for index, tap in enumerate(taps) if tap in reconstructed
            ),
        )

    @property
    def unit(self) -> int:
        """Numbers of a unit of `bank` and `ring`."""
        return self.bank.shape[1]

    @property
    def doses(self) -> int:
        """Number of doses of a token."""
        return self.tally.shape[1] - layout.TALLY_COLUMNS

    def width(self, tap: int) -> int:
        return self.units[tap] * self.unit

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        values = [getattr(self, field.name) for field in fields(self)]
        tensors = sum(int(value.nbytes) for value in values if isinstance(value, Tensor))
        return tensors + (0 if self.sae is None else self.sae.nbytes)


def upload(target: Tensor, values: Tensor) -> None:
    """Copy host values into a device buffer, without waiting for queued work."""
    if target.is_cuda:
        target.copy_(values.pin_memory(), non_blocking=True)
    else:
        target.copy_(values)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Return host values on a device, without waiting for queued work."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def scatter(target: Tensor, rows: list[int], values: Tensor) -> None:
    """Copy host values into some rows of a device buffer in one transfer, without waiting."""
    index = torch.tensor(rows, dtype=torch.int64)
    target.index_copy_(0, on_device(index, target.device), on_device(values, target.device))


def code(tap: Tap) -> int:
    """Return a tap's 32-bit code, the same everywhere: a signature is the sum of those that ran."""
    name = f"{tap[0]}:{tap[1]}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:4], "little", signed=True) | 1
