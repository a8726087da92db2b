"""Sums of doses, whatever order positions are computed in."""

import random
from typing import Any

import numpy as np
import pytest

from midstream.ops import layout
from midstream.runtime.worker.step.doses import Doses

COLUMNS = 3


def bits(values: Any) -> Any:
    """Doses as the device has them; NaN: none."""
    values = np.array(values, np.float32)
    found = np.maximum(values.view(np.int32), layout.NO_CHANGE)
    return np.where(np.isnan(values), 0, found).astype(np.int32)


def dose_at(slot: int, position: int, version: int = 0) -> list[float]:
    """Of three edits: of every position, of every third, and of the first 40."""
    value = (position * 7919 + slot * 104729 + version * 13) % 1000 / 250
    third = value / 2 if position % 3 == 0 else float("nan")
    return [value, third, value + 1 if position < 40 else float("nan")]


def totals(doses: Any, length: int) -> Any:
    """Sum, number and largest of each column over the first positions."""
    latest = doses.latest[doses.positions < length]
    has = latest >= 0
    return np.array(
        [
            doses.totals[0] + np.where(has, latest, 0).sum(0),
            doses.totals[1] + has.sum(0),
            np.maximum(doses.totals[2], latest.max(0, initial=0)),
        ]
    )


def wanted(slot: int, positions: Any, version: int = 0) -> Any:
    values = np.array([dose_at(slot, position, version) for position in positions])
    has = ~np.isnan(values)
    return np.array([np.nansum(values, 0), has.sum(0), np.nan_to_num(values).max(0, initial=0)])


def assert_sums(found: Any, expected: Any) -> None:
    columns = found.shape[1]  # those of which there is no dose may be missing at the end
    np.testing.assert_allclose(found, expected[:, :columns], rtol=1e-5)
    assert not expected[:, columns:].any()


class Request:
    """One that is computed in chunks and with drafts, preempted, and beyond its end."""

    def __init__(self, slot: int, draw: random.Random) -> None:
        self.slot, self.draw = slot, draw
        self.prompt, self.known, self.computed = draw.randrange(1, 90), 0, 0
        self.known = self.prompt

    def rows(self) -> list[tuple[int, int, list[float]]]:
        """The next step's."""
        if self.computed and self.draw.random() < 0.05:
            self.computed = 0
        start, drafts = self.computed, 0
        if self.known - start > 1:
            stop = min(self.known, start + self.draw.randrange(1, 64))
        else:
            drafts = self.draw.randrange(4)
            stop = self.known + drafts
        accepted = self.draw.randrange(drafts + 1)
        if stop >= self.known:
            self.known += 1 + accepted
            self.computed = self.known - 1
        else:
            self.computed = stop
        wrong = [9.0 + position for position in range(COLUMNS)]
        return [
            (
                self.slot,
                position,
                dose_at(self.slot, position) if position < self.computed else wrong,
            )
            for position in range(start, stop)
        ]


@pytest.mark.parametrize("seed", range(12))
def test_each_position_counts_once_with_its_latest_dose(seed):
    draw = random.Random(seed)
    doses = Doses(COLUMNS, drafts=4)
    doses.grow(4)
    requests = [Request(slot, draw) for slot in (2, 0, 3)]
    for _ in range(120):
        rows = [row for request in requests if draw.random() < 0.9 for row in request.rows()]
        draw.shuffle(rows)
        if not rows:
            continue
        slots, positions, values = zip(*rows, strict=True)
        doses.add(np.array(slots), np.array(positions), bits(values))
    for request in requests:
        (taken,) = doses.take([request.slot])[0]
        # The last accepted tokens may be beyond the end.
        length = max(request.known - 1 - draw.randrange(3), 1)
        if request.computed < request.known - 1:
            continue  # it was preempted last
        assert_sums(totals(taken, length), wanted(request.slot, range(length)))
    assert doses.take([0, 2, 3]) == [[], [], []]


@pytest.mark.parametrize("step", [1, 7])
def test_requests_that_go_on_together_have_the_doses_of_each(step):
    """A generated token a step, in stretches, of which some are far from the ones before."""
    doses, slots = Doses(COLUMNS), np.array([3, 0, 2])
    doses.grow(4)
    begins = np.array([0, 5, 60])
    positions: list[int] = []
    for stretch, count in ((0, 10), (50, 40), (91, 3), (130, 70)):
        positions += range(stretch * step, stretch * step + count)
    for position in positions:
        values = [
            dose_at(slot, position + begin) for slot, begin in zip(slots, begins, strict=True)
        ]
        doses.add(slots, begins + position, bits(values))
    for slot, begin in zip(slots.tolist(), begins, strict=True):
        ((taken,),) = doses.take([slot])
        every = [position + begin for position in positions]
        assert_sums(totals(taken, 9999), wanted(slot, every))


def test_versions_have_sums_of_their_own_and_may_return():
    doses = Doses(COLUMNS)
    doses.grow(2)
    for number, position in ((1, 50), (2, 70), (1, 90)):
        doses.change(1, number, position)
    versions = [0] * 50 + [1] * 20 + [2] * 20 + [1] * 30
    for position, version in enumerate(versions):
        for slot in (0, 1):
            value = dose_at(slot, position, version if slot else 0)
            doses.add(np.array([slot]), np.array([position]), bits([value]))
    doses.grow(300)
    (plain,), changed = doses.take([0, 1])
    assert_sums(totals(plain, 120), wanted(0, range(120)))
    assert [sums.version for sums in changed] == [0, 1, 2]
    for sums in changed:
        mine = [n for n, version in enumerate(versions) if version == sums.version]
        assert_sums(totals(sums, 120), wanted(1, mine, sums.version))


def test_what_is_no_number_is_no_dose_and_an_infinite_one_is_the_largest_float32():
    doses = Doses(COLUMNS, bound=2.0)
    doses.grow(1)
    device = bits([[np.inf, 0.0, 2.0]])
    device[0, 2] = np.array([np.nan], np.float32).view(np.int32)[0]
    doses.add(np.array([0]), np.array([0]), device)
    largest = float(np.finfo(np.float32).max)
    assert doses.above(device) == [(0, 0, largest)]
    ((taken,),) = doses.take([0])
    assert totals(taken, 1).tolist() == [[largest, 0.0], [1.0, 1.0], [largest, 0.0]]


def test_rows_beyond_the_bound_are_named_with_their_largest_dose():
    rows = bits([[0.1, np.nan, 2.0], [2.5, 3.5, 0.0], [np.nan] * 3, [0.0, 0.0, 2.25]])
    assert Doses(COLUMNS, bound=2.0).above(rows) == [(1, 1, 3.5), (3, 2, 2.25)]
    assert Doses(COLUMNS, bound=4.0).above(rows) == []
    assert Doses(COLUMNS).above(rows) == []
    rows[2, 1] = np.array([np.nan], np.float32).view(np.int32)[0]
    assert Doses(COLUMNS, bound=4.0).above(rows) == []
