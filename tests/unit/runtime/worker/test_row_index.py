"""The ledger against one that notes every row by itself."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds

from midstream.runtime.protocol.runs import expand_runs
from midstream.runtime.worker import row_index
from midstream.runtime.worker.row_index import CapturedRowIndex, ScoreIndex, ScoreRows
from midstream.transport import ring_copy
from midstream.transport.base import HostScores
from midstream.transport.ring_copy import ScoreLog

KINDS = [(0,), (0, 2), (1, 3, 4)]


@dataclass
class Given:
    """A step's rows, and how often they were read and freed."""

    values: torch.Tensor
    freed: int = 0
    reads: int = 0

    def rows(self) -> torch.Tensor:
        self.reads += 1
        return self.values

    def free(self) -> None:
        self.freed += 1


runs = st.tuples(
    st.integers(0, 3),  # request
    st.integers(0, 9),  # first position
    st.integers(1, 4),  # length
    st.sampled_from(KINDS),
)


orders = st.one_of(
    st.tuples(st.just("step"), st.lists(runs, min_size=1, max_size=4)),
    st.tuples(st.just("take"), st.sets(st.integers(0, 3), min_size=1)),
    st.tuples(st.just("until"), st.dictionaries(st.integers(0, 3), st.integers(0, 12))),
    st.tuples(st.just("until"), st.fixed_dictionaries(dict.fromkeys(range(4), st.integers(0, 12)))),
)
score_orders = st.one_of(
    st.tuples(
        st.just("step"), st.lists(runs, min_size=1, max_size=4), st.sampled_from(["alone", "log"])
    ),
    st.tuples(st.just("take"), st.sets(st.integers(0, 3), min_size=1)),
    st.tuples(
        st.just("read"),
        st.dictionaries(
            st.integers(0, 3), st.tuples(st.integers(0, 6), st.integers(6, 13)), min_size=1
        ),
    ),
)


@settings(max_examples=rounds(suite=200, nightly=2000))
@given(asked=st.lists(orders, max_size=14), few=st.sampled_from([0, 8]))
def test_rows_that_are_taken_between_steps_are_the_latest_of_each_position(asked, few):
    """With a table so small that runs are moved, and with both ways to find them."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(row_index, "_COLUMNS", 2)
        changed.setattr(row_index, "_FEW", few)
        ledger, sources, counter, oldest = CapturedRowIndex(), [], 0, 0
        left: dict[tuple[int, tuple[int, ...]], dict[int, list[float]]] = {}
        for what, given_ in asked:
            if what == "step":
                columns: list[list[int]] = []
                values: list[list[float]] = []
                for serial, position, length, taps in given_:
                    columns.append([serial, position, length, len(values), ledger.kind(taps)])
                    for nth in range(length):
                        record = [float(counter + one) for one in range(len(taps))]
                        counter += len(taps)
                        values += [[one] for one in record]
                        left.setdefault((serial, taps), {})[position + nth] = record
                sources.append(Given(torch.tensor(values)))
                ledger.record(sources[-1], *np.array(columns).T)
                continue
            stops = given_ if what == "until" else dict.fromkeys(given_, 99)
            expected = {
                key: rows
                for key in left
                if key[0] in stops and (rows := within(left[key], 0, stops[key[0]]))
            }
            if what == "until":
                found, remains = ledger.take_until(stops, oldest)
                # Only where all were asked for does it say where to look next.
                oldest = remains if len(stops) == 4 else oldest
            else:
                found = ledger.take([*stops])
            assert set(found) == set(stops)
            assert shown(found) == expected
            for key, rows in expected.items():
                for position in rows:
                    del left[key][position]
            ledger.free_taken()
        rows_left = sum(map(len, left.values()))
        assert (rows_left == 0) <= (len(ledger) == 0)
        ledger.take([0, 1, 2, 3])
        ledger.free_taken()
        assert [each.freed for each in sources] == [1] * len(sources)


@settings(max_examples=rounds(suite=200, nightly=2000))
@given(asked=st.lists(score_orders, max_size=14))
def test_scores_that_are_taken_or_read_between_steps_are_the_latest_of_each_position(asked):
    """Each step in memory of its own, or in memory that steps share until it is full."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(row_index, "_COLUMNS", 2)
        changed.setattr(ring_copy, "_ROWS", 8)
        index, log, counter = ScoreIndex(), ScoreLog(), 0
        left: dict[int, dict[int, list[float]]] = {}
        for what, argument, *place in asked:
            if what == "step":
                columns, values = [], []
                for serial, position, length, _ in argument:
                    columns.append([serial, position, length, len(values)])
                    for offset in range(length):
                        counter += 2
                        values.append([float(counter), float(counter + 1)])
                        left.setdefault(serial, {})[position + offset] = values[-1]
                scores = torch.tensor(values)
                placed = log.add(scores) if place == ["log"] else HostScores(scores, 0, len(values))
                serials, positions, *runs = np.array(columns).T
                index.add(Shipped(placed), serials, positions, tuple(runs))
            elif what == "read":
                expected = {
                    serial: scores
                    for serial, (start, stop) in argument.items()
                    if (scores := within(left.get(serial, {}), start, stop))
                }
                read = index.read(argument, sum(map(len, expected.values())))
                assert by_position(read) == expected
            else:
                expected = {serial: left.pop(serial) for serial in argument if left.get(serial)}
                assert by_position(index.take_scores([*argument])) == expected
        assert (not any(left.values())) <= (len(index) == 0)


@dataclass
class Shipped:
    """Scores of a step, and how often they were read."""

    placed: HostScores
    reads: int = 0

    def scores(self) -> HostScores:
        self.reads += 1
        return self.placed


def by_position(taken: dict[int, ScoreRows]) -> dict[int, dict[int, list[float]]]:
    """The scores of each request by position; spans ascend, with a gap between two."""
    for rows in taken.values():
        ends = [first + length for first, length in rows.spans]
        assert all(end < first for end, (first, _) in zip(ends, rows.spans[1:], strict=False))
    return {
        serial: dict(zip(expand_runs(rows.spans).tolist(), rows.values.tolist(), strict=True))
        for serial, rows in taken.items()
    }


def test_no_row_is_lost_when_the_index_makes_room_for_more():
    ledger, requests = CapturedRowIndex(), 64
    serial, kind = np.arange(requests), np.full(requests, ledger.kind((0,)))
    for step in range(3 * row_index._COLUMNS // requests):
        rows = Given(torch.arange(requests).view(-1, 1) + 1000 * step)
        ledger.record(rows, serial, np.full(requests, step), np.ones_like(serial), serial, kind)
        if step == 8:
            (block,) = ledger.take([5])[5]
            assert block.values.flatten().tolist() == [5 + 1000 * nth for nth in range(9)]
    for request, (block,) in ledger.take([*range(requests)]).items():
        begin = 9 if request == 5 else 0
        assert block.positions.tolist() == [*range(begin, step + 1)]
        assert block.values.flatten().tolist() == [
            request + 1000 * nth for nth in range(begin, step + 1)
        ]
    assert len(ledger) == 0


def record(ledger: CapturedRowIndex, serial: int, position: int, value: float) -> Given:
    """Record a row of one number."""
    rows, kind = Given(torch.tensor([[value]])), ledger.kind((0,))
    ledger.record(rows, *(np.array([number]) for number in (serial, position, 1, 0, kind)))
    return rows


@pytest.mark.parametrize("stays", [True, False], ids=["but one", "all"])
def test_the_index_is_small_again_when_the_runs_of_a_rush_were_taken(stays: bool, monkeypatch):
    monkeypatch.setattr(row_index, "_COLUMNS", 64)
    ledger = CapturedRowIndex()
    if stays:
        record(ledger, 5, 0, 7.0)
    for step in range(20 * row_index._COLUMNS):
        record(ledger, 6, step, 0.0)
    ledger.take([6])
    record(ledger, 5, 1, 8.0)
    assert ledger._table.shape[1] == row_index._COLUMNS
    (block,) = ledger.take([5])[5]
    assert block.values.flatten().tolist() == [7.0, 8.0][not stays :]
    assert len(ledger) == 0


def test_of_a_position_that_is_computed_again_the_latest_row_stands():
    ledger = CapturedRowIndex()
    for position, value in ((0, 1.0), (1, 2.0), (0, 3.0), (1, 4.0), (0, 5.0)):
        record(ledger, 7, position, value)
    (block,) = ledger.take([7])[7]
    assert block.positions.tolist() == [0, 1]
    assert block.values.flatten().tolist() == [5.0, 4.0]


def test_a_look_waits_for_the_steps_that_it_needs_and_no_other():
    index, steps, one, start = ScoreIndex(), [], np.ones(1, np.int64), np.zeros(1, np.int64)
    for position in range(6):
        steps.append(Shipped(HostScores(torch.tensor([[float(position)]]), 0, 1)))
        index.add(steps[-1], 7 * one, position * one, (one, start))
    rows = index.read({7: (3, 5)}, 2)[7]
    assert rows.spans == [(3, 2)]
    assert rows.values.flatten().tolist() == [3.0, 4.0]
    assert [bool(step.reads) for step in steps] == [False, False, False, True, True, False]
    assert index.read({7: (3, 5)}, 0) == {}
    assert index.read({8: (3, 5)}, 2) == {}
    assert len(index) == 6


def within(rows: dict[int, list[float]], start: int, stop: int) -> dict[int, list[float]]:
    return {position: row for position, row in rows.items() if start <= position < stop}


def shown(found):
    """The rows of some blocks, by request and taps, and by position."""
    return {
        (serial, block.taps): dict(
            zip(block.positions.tolist(), block.values[:, :, 0].tolist(), strict=True)
        )
        for serial, blocks in found.items()
        for block in blocks
    }


def test_a_step_without_runs_is_not_kept():
    ledger = CapturedRowIndex()
    nothing = np.zeros(0, np.int64)
    ledger.record(Given(torch.zeros(0, 2)), *[nothing] * 5)
    assert len(ledger) == 0
