"""The items of an epoch are divided over ranks and workers, and an interrupted one goes on."""

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from midstream.errors import StoreError
from midstream.store.epoch import EpochOrder, EpochProgress


@st.composite
def orders(draw):
    settings = {
        "items": draw(st.integers(0, 400)),
        "batch_size": draw(st.integers(1, 60)),
        "chunk": draw(st.sampled_from([1, 16, 256])),
        "buffer": draw(st.integers(1, 300)),
        "shuffle": draw(st.booleans()),
        "seed": draw(st.integers(0, 3)),
        "world_size": draw(st.integers(1, 4)),
        "drop_last": draw(st.booleans()),
    }
    if settings["items"] < settings["world_size"] or settings["batch_size"] == 1:
        settings["drop_last"] = True
    return settings


def batches(order, epoch, worker=0, workers=1, done=0):
    windows = list(order.windows(epoch, worker, workers, done))
    assert all(windows)
    return [batch.tolist() for window in windows for batch in window]


def loaded(order, epoch, workers, done=None):
    """Batches in the order of a loader: its workers take turns, the first of `done` first."""
    lists = [
        batches(order, epoch, worker, workers, done[worker] if done else 0)
        for worker in range(workers)
    ]
    turns = max(map(len, lists))
    return [own[turn] for turn in range(turns) for own in lists if turn < len(own)]


# Eight batches of three workers: two of them have one more than the third.
EIGHT = {"items": 40, "batch_size": 5, "chunk": 1, "buffer": 10, "shuffle": True, "seed": 0,
         "world_size": 1, "drop_last": False}  # fmt: skip


@given(orders(), st.integers(1, 5), st.integers(0, 2))
@example(EIGHT, 3, 0)
def test_every_item_comes_once_over_all_ranks_and_workers(settings, workers, epoch):
    ranks = [EpochOrder(rank=rank, **settings) for rank in range(settings["world_size"])]
    each = [loaded(order, epoch, workers) for order in ranks]
    assert {len(of_rank) for of_rank in each} == {ranks[0].batches}
    items = [item for of_rank in each for batch in of_rank for item in batch]
    size = settings["batch_size"]
    if settings["drop_last"]:
        assert {len(batch) for of_rank in each for batch in of_rank} <= {size}
        assert len(items) == len(set(items))
        assert set(items) <= set(range(settings["items"]))
        assert settings["items"] - len(items) < size * settings["world_size"]
    else:
        assert sorted(items) == list(range(settings["items"]))
        assert all(1 <= len(batch) <= size for of_rank in each for batch in of_rank)
        assert all(sum(len(batch) < size for batch in of_rank) <= 2 for of_rank in each)
    if not settings["shuffle"]:
        assert items == list(range(len(items)))


@given(orders(), st.integers(1, 5), st.data())
def test_a_worker_goes_on_after_any_batch(settings, workers, data):
    order = EpochOrder(rank=settings["world_size"] - 1, **settings)
    worker = data.draw(st.integers(0, workers - 1))
    every = batches(order, 1, worker, workers)
    done = data.draw(st.integers(0, len(every)))
    assert batches(order, 1, worker, workers, done) == every[done:]


@given(orders(), st.integers(1, 5), st.data())
def test_a_loader_goes_on_with_the_next_batch_in_the_same_order(settings, workers, data):
    order = EpochOrder(rank=0, **settings)
    every = loaded(order, 2, workers)
    used = data.draw(st.integers(0, len(every)))
    before = EpochProgress(order)
    before.set_epoch(2)
    for worker in range(workers):
        before.begin(worker, workers)
    state = json.loads(json.dumps(before.state(used, in_worker=False)))
    after = EpochProgress(order)
    after.load(state, in_worker=False)
    after.set_epoch(2)
    assert after.state(None, in_worker=False) == state
    places = [after.begin(worker, workers) for worker in range(workers)]
    lists = [batches(order, 2, number, workers, done) for number, done in places]
    turns = max(map(len, lists))
    rest = [own[turn] for turn in range(turns) for own in lists if turn < len(own)]
    assert rest == every[used:]
    # The epoch after it begins at its start, whether or not it has another number.
    assert [after.begin(worker, workers) for worker in range(workers)] == [
        (worker, 0) for worker in range(workers)
    ]


def test_a_loader_goes_on_with_the_worker_whose_turn_it_is():
    order = EpochOrder(rank=0, **EIGHT)
    before = EpochProgress(order)
    for worker in range(3):
        before.begin(worker, 3)
    after = EpochProgress(order)
    after.load(before.state(4, in_worker=False), in_worker=False)
    # Four batches came from workers 0, 1, 2 and 0: the next one is of worker 1.
    assert [after.begin(worker, 3) for worker in range(3)] == [(1, 1), (2, 1), (0, 2)]


@given(orders(), st.integers(1, 4), st.data())
def test_a_worker_goes_on_from_its_own_state(settings, workers, data):
    """As torchdata's StatefulDataLoader keeps and loads it."""
    order = EpochOrder(rank=0, **settings)
    worker = data.draw(st.integers(0, workers - 1))
    every = batches(order, 1, worker, workers)
    used = data.draw(st.integers(0, len(every)))
    before = EpochProgress(order)
    before.set_epoch(1)
    assert before.begin(worker, workers) == (worker, 0)
    for _ in range(used):
        before.advance()
    state = before.state(None, in_worker=True)
    after = EpochProgress(order)
    after.load(json.loads(json.dumps(state)), in_worker=True)
    assert after.state(None, in_worker=True) == state
    assert after.epoch == 1
    place = after.begin(worker, workers)
    assert batches(order, 1, place[0], workers, place[1]) == every[used:]
    assert after.begin(worker, workers) == (worker, 0)


def test_batches_that_cannot_be_the_same_number_for_all_ranks_need_drop_last():
    fields = {"chunk": 256, "buffer": 1, "shuffle": False, "seed": 0, "rank": 1}
    for items, size, world_size in ((3, 1, 2), (3, 4, 4)):
        known = {"items": items, "batch_size": size, "world_size": world_size, **fields}
        with pytest.raises(StoreError, match=f"drop_last: expected True: {items} items cannot be"):
            EpochOrder(drop_last=False, **known)
        assert EpochOrder(drop_last=True, **known).batches == items // (size * world_size)
    known = {"items": 4, "batch_size": 1, "world_size": 2, **fields}
    assert batches(EpochOrder(drop_last=False, **known), 0) == [[2], [3]]
    for items in range(2, 60):
        order = EpochOrder(items=items, batch_size=2, world_size=2, drop_last=False, **fields)
        assert sum(batches(order, 0), []) == list(range(items // 2, items))


def test_a_batch_is_drawn_from_as_many_items_as_the_buffer_has():
    order = EpochOrder(
        items=20_000, batch_size=64, chunk=256, buffer=1024, shuffle=True, seed=0, rank=0,
        world_size=1, drop_last=False,
    )  # fmt: skip
    windows = list(order.windows(0, 0, 1))
    assert {len(window) for window in windows[:-1]} == {16}
    for window in windows[:-1]:
        chunks = [{item // 256 for item in batch.tolist()} for batch in window]
        assert len(set.union(*chunks)) <= 6
        assert min(map(len, chunks)) >= 4
        assert all((np.diff(batch) < 0).any() for batch in window)
    firsts = [window[0][0] // 1024 for window in windows]
    assert firsts != sorted(firsts)


ORDER = EpochOrder(
    items=100, batch_size=8, chunk=4, buffer=32, shuffle=True, seed=0, rank=0, world_size=2,
    drop_last=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"seed": 1}, "state: seed: expected 0 as in this dataset, got '1'"),
        ({"items": 99}, "state: items: expected 100"),
        ({"rank": 1}, "state: rank: expected 0"),
        ({"batch_size": "8"}, "state: batch_size: expected 8"),
        ({"batches": 8}, "state: batches: expected 0 to 7, got 8"),
        ({"batches": True}, "state: batches: expected `int`"),
        ({"epoch": -1}, "state: epoch: expected 0 to"),
        ({"workers": 0}, "state: workers: expected 1 to 1024"),
        ({"worker": 0}, "state: it is a worker's, which its loader loads"),
    ],
)
def test_a_state_of_another_epoch_is_refused(change, problem):
    progress = EpochProgress(ORDER)
    with pytest.raises(StoreError, match=problem):
        progress.load(progress.state(3, in_worker=False) | change, in_worker=False)
    with pytest.raises(StoreError, match="state: expected what state_dict"):
        progress.load([3], in_worker=False)
    state = progress.state(3, in_worker=False)
    with pytest.raises(StoreError, match="state: batches: missing"):
        progress.load({name: state[name] for name in state if name != "batches"}, in_worker=False)
    with pytest.raises(StoreError, match="state: it is a rank's"):
        progress.load(progress.state(3, in_worker=False), in_worker=True)


def test_a_shuffled_epoch_does_not_go_on_with_another_number_of_workers():
    progress = EpochProgress(ORDER)
    progress.begin(0, 2)
    with pytest.raises(StoreError, match="batches: expected the number of batches that the loader"):
        progress.state(None, in_worker=False)
    state = progress.state(3, in_worker=False)
    progress.load(state, in_worker=False)
    with pytest.raises(StoreError, match="num_workers: the epoch was begun with 2 workers, got 3"):
        progress.begin(0, 3)
    with pytest.raises(StoreError, match="num_workers: expected at most 1024, got 2000"):
        progress.begin(0, 2000)
