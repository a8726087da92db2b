"""Sums of rows on the device, against numpy in float64."""

import random

import numpy as np
import pytest
import torch
from support.fake_steps import make_buffers
from support.nightly import rounds
from torch import Tensor

from midstream.codecs import Raw
from midstream.errors import NoRoomError
from midstream.plan.readouts.reduced import RETURNED
from midstream.plan.resolved import REDUCING, Pattern
from midstream.runtime.protocol.segments import PatternRead
from midstream.runtime.worker.reductions import CountedRows, Reductions, _running, place_of
from midstream.runtime.worker.request_state import Segment
from midstream.runtime.worker.tables.codec_table import CodecTable
from midstream.runtime.worker.tables.pattern_records import PatternColumns, PatternEncoding

WIDTH = 6
# Records of four taps; the third is not reduced.
WIDTHS = (6, 6, 4, 10)


def columns_of(kind: str, capture: int, taps: tuple[int, ...]) -> list[PatternColumns]:
    size = 1 + RETURNED[kind] * WIDTHS[taps[0]]
    return [
        PatternColumns(capture, place, tap, sum(WIDTHS[:tap]), WIDTHS[tap], kind, size, (), 1)
        for place, tap in enumerate(taps)
    ]


def encoding_of(*columns: list[PatternColumns]) -> PatternEncoding:
    every = tuple(one for each in columns for one in each)
    return PatternEncoding(Raw(), (), 1, (), every)


def segment_of(encoding: PatternEncoding) -> Segment:
    reads = tuple(
        PatternRead(
            each.tap, each.capture, each.place, Pattern(each.kind, each.size, (), (), (), ()), (), 1
        )
        for each in encoding.patterns
    )
    return Segment(0, 9, (), (), 1, 1, 0, patterns=reads)


def expected(kind: str, rows: np.ndarray) -> np.ndarray:
    if kind == "max":
        return rows.max(0)
    if kind == "mean":
        return rows.mean(0)
    return np.concatenate([rows.mean(0), rows.var(0)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(rounds(suite=2, nightly=12)))
def test_any_pieces_of_any_requests_give_what_numpy_gives(seed: int, dtype: torch.dtype) -> None:
    """Requests come and go, and their rows in pieces; values are far from 0 and close together."""
    draw, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    sums = Reductions(40, WIDTH, torch.device("cpu"))
    running: dict[int, tuple[PatternEncoding, list[Tensor]]] = {}
    largest, number = 0.0, 0
    for _ in range(300):
        slot = draw.randrange(8)
        if slot not in running:
            kinds = [draw.choice(REDUCING) for _ in range(2)]
            encoding = encoding_of(
                columns_of(kinds[0], 0, draw.choice([(0, 1), (1,)])), columns_of(kinds[1], 3, (3,))
            )
            try:
                sums.acquire(slot, [segment_of(encoding)] * 2, WIDTHS)
            except NoRoomError:
                sums.check_integrity()
                continue
            number += 1
            running[slot] = encoding, []
        encoding, rows = running[slot]
        shape = draw.choice((1, 1, 7, 300)), sum(WIDTHS)
        more = (1000 * draw.random() + torch.randn(shape, generator=numbers)).to(dtype)
        count = sum(map(len, rows))
        assert sums.count({slot: [CountedRows(count, encoding, more)]}, 1) == {}
        rows.append(more)
        if draw.random() < 0.3:
            every = torch.cat(rows).double().numpy()
            for columns in encoding.patterns:
                (found,) = sums.rows([slot], columns, place_of(encoding, columns))
                assert int(found[:1].view(torch.int32)) == len(every)
                mine = every[:, columns.start : columns.start + columns.width]
                wanted = expected(columns.kind, mine)
                error = np.abs(found[1:].double().numpy() - wanted) / np.maximum(1e-9, abs(wanted))
                largest = max(largest, error[wanted != 0].max(initial=0))
                assert (found[1:].numpy()[wanted == 0] == 0).all()
            sums.release(slot)
            del running[slot]
        sums.check_integrity()
        assert len(sums) == len(running)
    assert number > 30
    assert largest <= 1e-6, largest


def test_moments_of_values_that_are_close_together_keep_their_variance() -> None:
    """A mean of 10⁶ and a variance of 10⁻²; and of equal rows it is exactly 0."""
    numbers = torch.Generator().manual_seed(1)
    rows = 1e6 + 0.1 * torch.randn(5000, 6, generator=numbers, dtype=torch.float64)
    rows[:, 5] = 3e4 + 1 / 3
    rows = rows.float()
    encoding = encoding_of(columns_of("moments", 0, (0,)))
    sums = Reductions(3, WIDTH, torch.device("cpu"))
    sums.acquire(2, [segment_of(encoding)], WIDTHS)
    for nth, part in enumerate(rows.split(1300)):
        sums.count({2: [CountedRows(1300 * nth, encoding, part)]}, 1)
    (found,) = sums.rows([2], encoding.patterns[0], 0)
    wanted = rows.double().var(0, correction=0)
    torch.testing.assert_close(found[7:12].double(), wanted[:5], rtol=1e-6, atol=0)
    assert float(found[12]) == 0


def test_positions_that_come_again_count_once() -> None:
    """As after a preemption on an engine without a prefix cache, in pieces of two encodings."""
    encoding = encoding_of(columns_of("mean", 0, (0,)), columns_of("max", 1, (1,)))
    alone = encoding_of(columns_of("mean", 0, (0,)))
    sums = Reductions(4, WIDTH, torch.device("cpu"))
    sums.acquire(0, [segment_of(encoding)], WIDTHS)
    rows = torch.randn(20, sum(WIDTHS), generator=torch.Generator().manual_seed(3))
    for start, stop in ((0, 7), (7, 12), (0, 9), (9, 20)):
        middle = min(stop, max(start, 10))
        pieces = [
            CountedRows(middle, alone, rows[middle:stop]),
            CountedRows(start, encoding, rows[start:middle]),
        ]
        sums.count({0: [piece for piece in pieces if len(piece.records)]}, 1)
    for columns, wanted in zip(
        encoding.patterns, (rows[:, :6].mean(0), rows[:10, 6:12].amax(0)), strict=True
    ):
        (found,) = sums.rows([0], columns, 0)
        assert int(found[:1].view(torch.int32)) == (20 if columns.capture == 0 else 10)
        torch.testing.assert_close(found[1:], wanted)


def test_what_a_request_needs_is_refused_as_a_whole() -> None:
    encoding = encoding_of(columns_of("moments", 0, (0, 1)))
    sums = Reductions(5, WIDTH, torch.device("cpu"))
    with pytest.raises(NoRoomError, match="no room for 6 vectors of sums"):
        sums.acquire(0, [segment_of(encoding)], WIDTHS)
    sums.check_integrity()
    assert not len(sums)
    # Of a request that has ended.
    sums.count({0: [CountedRows(0, encoding, torch.ones(2, sum(WIDTHS)))]}, 1)


def test_an_encoding_of_counted_vectors_alone_returns_nothing() -> None:
    buffers = make_buffers()
    table = CodecTable(buffers)
    pattern = Pattern("mean", 5, (), (), (("resid_pre", 0),), (1,))
    read = PatternRead(0, 0, 0, pattern, (), 1, returned=False)
    number = table.pattern_number("raw", (0,), (), (read,))
    encoding = table.encoding(number)
    assert isinstance(encoding, PatternEncoding)
    assert encoding.has_sums
    assert encoding.row_bytes(torch.float32) == 0
    returned = table.pattern_number("raw", (0,), (), (read._replace(returned=True),))
    assert table.encoding(returned).row_bytes(torch.float32) == 20


@pytest.mark.parametrize("kind", REDUCING)
def test_sums_have_the_same_bits_wherever_rows_are_divided(kind: str) -> None:
    made = torch.Generator().manual_seed(0)
    # Of so different sizes that float64 rounds their sums.
    sizes = 10.0 ** torch.randint(-6, 12, (40, 5), generator=made).double()
    rows = torch.randn(40, 5, generator=made).double() * sizes
    start = [torch.zeros(5, dtype=torch.float64)] * (3 if kind == "moments" else 1)
    whole = _running(kind, start, rows)
    for cut in range(1, 40):
        before = _running(kind, start, rows[:cut])
        after = _running(kind, [sums[-1] for sums in before], rows[cut:])
        for sums, first, last in zip(whole, before, after, strict=True):
            assert torch.equal(sums, torch.cat([first, last]))
