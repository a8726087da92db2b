"""Tapped layers without an engine: buffers, the contents that a step writes, and results."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.runtime.models.decoder import DecoderLayer
from midstream.runtime.protocol.segments import Room
from midstream.runtime.worker.tables.device_buffers import Buffers, BufferSizes
from midstream.runtime.worker.taps.taps import tap_layer
from midstream.sites import Tap

WIDTH, ROWS = 4, 3


def make_buffers(taps) -> Buffers:
    """Small buffers on the CPU, float32."""
    return Buffers.allocate(
        dict.fromkeys(taps, WIDTH),
        BufferSizes(
            max_tokens=16, hidden_size=WIDTH, ring_rows=256,
            room=Room(bank_rows=16, programs=16, max_edits=16, token_ids=1, probes=1),
        ),
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip


def arm(buffers: Buffers, rows: int, num_taps: int, edits: dict[int, float] | None = None) -> None:
    """Every row captured at every tap, and a constant added at some of them, by index."""
    buffers.table[:, 2].zero_()
    for nth, (tap, value) in enumerate((edits or {}).items()):
        buffers.bank[nth] = value
        buffers.instructions[nth, layout.OP] = Op.ADD
        buffers.instructions[nth, layout.WRITE] = nth
        buffers.instructions[nth, layout.FLAGS] = Flags.FRESH | Flags.COUNTED
        buffers.params[nth, layout.A] = 1.0
        buffers.table[tap, 2, layout.EDIT_START] = nth
        buffers.table[tap, 2, layout.EDIT_COUNT] = 1
    buffers.table[:, 1, layout.PLACE] = torch.arange(1, num_taps + 1, dtype=torch.int32)
    buffers.tokens[:rows, layout.PROGRAM] = 2
    buffers.tokens[:rows, layout.GROUP] = 1
    buffers.tokens[:rows, layout.RECORD] = 1 + num_taps * torch.arange(rows, dtype=torch.int32)
    buffers.tally.zero_()


def read(buffers: Buffers, rows: int, num_taps: int) -> Tensor:
    """[rows, taps, width] as captured."""
    return buffers.ring[: rows * num_taps].view(rows, num_taps, WIDTH).clone()


def tapped(kind, sites: tuple[Tap, ...]):
    """(a layer, the same layer tapped, the buffers) of a class that has a `convention`."""
    torch.manual_seed(3)
    plain = kind()
    layer = copy.deepcopy(plain)
    buffers = make_buffers(sites)
    taps = {tap: n for n, tap in enumerate(sites)}
    tap_layer(DecoderLayer(0, layer, kind.convention), taps, buffers)
    return plain, layer, buffers


def assert_same_out(found, wanted):
    """Equal as a layer's return values, to rounding."""
    found = found if isinstance(found, tuple) else (found,)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other)
