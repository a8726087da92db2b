"""Checks of the tapped model as the engine starts: if another forward runs than was read, every tap
may fire once with rows of something else, but the sums of a layer's sites do not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise

import torch
from torch import Tensor

from midstream.errors import UnsupportedError
from midstream.ops import layout
from midstream.ops.layout import Flags, Op
from midstream.runtime.models.convention import LONE_MIXER, PARALLEL, Lack
from midstream.runtime.models.decoder import DecoderLayer
from midstream.runtime.worker.tables.device_buffers import Buffers
from midstream.runtime.worker.taps.tap_check import check_taps
from midstream.sites import Tap

# Each stored row is rounded once, and the model rounds its sums once more. In float32 the ranks'
# order of summation counts too.
LEAST_TOLERANCE = 1e-5
# Their rows add up, and are as wide as the stream.
_SITES = ("resid_pre", "attn_out", "mlp_out", "resid_mid", "resid_post")
_SEED = 20261129


@dataclass(frozen=True, slots=True)
class Sum:
    """Rows at the taps `terms` add up to the row at `total`."""

    terms: tuple[Tap, ...]
    total: Tap

    def __str__(self) -> str:
        parts = [f"{site} of layer {layer}" for site, layer in _taps_of(self)]
        return f"{' + '.join(parts[:-1])} is not {parts[-1]}"


def claimed_sums(layers: Sequence[DecoderLayer], taps: Mapping[Tap, int]) -> list[Sum]:
    """Return the sums that layers claim and of which every term is tapped, in forward order."""
    sums = [claimed for layer in layers for claimed in _within(layer)]
    sums += [
        Sum((("resid_post", layer.index),), ("resid_pre", following.index))
        for layer, following in pairwise(layers)
        if following.index == layer.index + 1 and "resid_pre" not in layer.convention.unsummed
    ]
    return [claimed for claimed in sums if all(tap in taps for tap in _taps_of(claimed))]


def _within(layer: DecoderLayer) -> Iterator[Sum]:
    convention, number = layer.convention, layer.index
    pre, mid, post = ("resid_pre", number), ("resid_mid", number), ("resid_post", number)
    branches = [
        (site, number)
        for site in ("attn_out", "mlp_out")
        if not isinstance(convention.branches[site], Lack)
    ]
    sums = []
    if convention.mid is not None:
        sums = [Sum((pre, ("attn_out", number)), mid), Sum((mid, ("mlp_out", number)), post)]
    elif len(branches) == {PARALLEL: 2, LONE_MIXER: 1}.get(convention.no_mid):
        sums = [Sum((pre, *branches), post)]
    yield from (claimed for claimed in sums if claimed.total[0] not in convention.unsummed)


def check_model(
    buffers: Buffers,
    layers: Sequence[DecoderLayer],
    taps: Mapping[Tap, int],
    run: Callable[[], object],
) -> None:
    """Check in trial runs that each tap fires once (else TapError), and that the sums which layers
    claim hold (else UnsupportedError). `run` runs the tapped model on at least one row; no token
    has a program before and after.
    """
    check_taps(buffers, taps, run)
    sums = claimed_sums(layers, taps)
    totals = {claimed.total for claimed in sums}
    tolerance = max(torch.finfo(buffers.ring.dtype).eps / 2, LEAST_TOLERANCE)
    for part in _parts(sums, buffers.ring.shape[0], buffers.units, taps):
        with _trial(buffers, taps, totals, chain.from_iterable(map(_taps_of, part))) as starts:
            run()
            rows = {
                tap: buffers.ring[start : start + buffers.units[taps[tap]]].float().cpu().flatten()
                for tap, start in starts.items()
            }
        for claimed in part:
            error = _error(claimed, rows)
            # An error that is not a number is none that is small.
            if not error <= tolerance:
                raise UnsupportedError(_message(claimed, error, layers))


def _taps_of(claimed: Sum) -> tuple[Tap, ...]:
    return *claimed.terms, claimed.total


def _parts(
    sums: Sequence[Sum], room: int, units: Sequence[int], taps: Mapping[Tap, int]
) -> Iterator[list[Sum]]:
    """Divide the sums into parts whose rows fit in `room`; `units`: of a row at each tap."""
    part: list[Sum] = []
    chosen: set[Tap] = set()
    for claimed in sums:
        more = chosen | set(_taps_of(claimed))
        if part and sum(units[taps[tap]] for tap in more) > room:
            yield part
            part, more = [], set(_taps_of(claimed))
        part.append(claimed)
        chosen = more
    if part:
        yield part


@contextmanager
def _trial(
    buffers: Buffers, taps: Mapping[Tap, int], totals: Collection[Tap], chosen: Iterable[Tap]
) -> Iterator[dict[Tap, int]]:
    """Give the first token a program: random rows at terms, as those of a trial run may be zero,
    and captures. Yields the ring's unit of each captured row.
    """
    table, bank = buffers.table, buffers.bank
    tapped = list(dict.fromkeys(chosen))
    # Of a row of the stream; other sites may be narrower.
    row, unit = table.shape[1] - 1, buffers.units[taps[tapped[0]]]
    count = min(2 * len(_SITES), bank.shape[0] // unit, buffers.instructions.shape[0])
    start, first = bank.shape[0] - count * unit, buffers.instructions.shape[0] - count
    written = [buffers.tokens[:1], buffers.tally[:1], table[:, 0], table[:, row], bank[start:]]
    written += [buffers.instructions[first:], buffers.params[first:]]
    kept = [tensor.clone() for tensor in written]
    generator = torch.Generator().manual_seed(_SEED)
    rows = torch.randn(len(_SITES) * unit, bank.shape[1], generator=generator)
    # Layers take back what the layers before them added, so that no stream becomes long.
    bank[start:] = torch.cat((rows, -rows))[: count * unit]
    for number in range(count):
        instruction = [0] * layout.INSTRUCTION_COLUMNS
        instruction[layout.OP] = Op.REPLACE
        instruction[layout.WRITE] = start + number * unit
        instruction[layout.FLAGS] = Flags.FRESH | Flags.COUNTED
        buffers.instructions[first + number] = torch.tensor(instruction, dtype=torch.int32)
        buffers.params[first + number, layout.A] = 1.0
    table[:, 0, layout.FIRST] = 0
    table[:, row] = 0
    for tap in taps:
        if tap[0] in _SITES and tap not in totals:
            vector = _SITES.index(tap[0]) + len(_SITES) * (tap[1] % 2)
            table[taps[tap], row, layout.EDIT_START] = first + vector % count
            table[taps[tap], row, layout.EDIT_COUNT] = 1
    starts, end = {}, 0
    for tap in tapped:
        starts[tap] = end
        table[taps[tap], row, layout.PLACE] = 1 + end
        end += buffers.units[taps[tap]]
    buffers.tokens[0, layout.PROGRAM] = buffers.tokens[0, layout.GROUP] = row
    buffers.tokens[0, layout.RECORD] = 1
    try:
        yield starts
    finally:
        for tensor, before in zip(written, kept, strict=True):
            tensor.copy_(before)


def _error(claimed: Sum, rows: Mapping[Tap, Tensor]) -> float:
    """Return the norm of what a sum is off by, relative to the norms of all its rows together."""
    terms = [rows[tap] for tap in claimed.terms]
    total = rows[claimed.total]
    size = sum(float(row.norm()) for row in (*terms, total))
    return float((torch.stack(terms).sum(dim=0) - total).norm()) / size if size else 0.0


def _message(claimed: Sum, error: float, layers: Sequence[DecoderLayer]) -> str:
    site, number = claimed.total
    cls = next(type(layer.module) for layer in layers if layer.index == number)
    name = cls.__qualname__.removeprefix("Tapped")
    return (
        f"rows of {site} of layer {number}, a {name}, would be wrong: in a trial run {claimed} "
        f"(off by {error:.1e} of their norms). Another forward runs than the one that midstream "
        "knows; undo what changed it (a patched `forward`, a replaced sub-module), or leave one "
        "of these sites out of midstream's setting `sites`"
    )
