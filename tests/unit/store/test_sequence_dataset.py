"""Whole sequences come with every token, its rows, and its place in its document."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from torch.utils.data import DataLoader
from unit.store.making import entry, same, write
from unit.store.random_stores import TAPS, Written, stores, values_of

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import SequenceDataset

A, B, C, D = TAPS


def whole(written, taps):
    """(request -> its positions) of completions whose tokens all have all taps, without a gap."""
    joined, partial = written.joined(taps), written.partial(taps)
    sequences = {}
    for request in {request for request, _ in joined}:
        positions = sorted(place for owner, place in joined if owner == request)
        is_run = positions == list(range(positions[0], positions[-1] + 1))
        if is_run and request not in {owner for owner, _ in partial}:
            sequences[request] = positions
    return sequences


def documents(written, taps, batch, row, marks):
    """Return (request, positions) of each document of a row; every other field is compared."""
    values = values_of(batch, taps, written.head)
    real = batch["attention_mask"][row]
    assert torch.equal(real, batch["document"][row] >= 0)
    count = int(batch["lengths"][row])
    assert real.tolist() == [True] * count + [False] * (len(real) - count)
    for name, at_padding in (("input_ids", 0), ("positions", 0), ("index", -1), ("loss_mask", 0)):
        assert (batch[name][row][count:] == at_padding).all()
    for of_tap in values:
        assert not of_tap[row][count:].any()
    made = []
    selection = written.store.select()
    for number in range(int(batch["document"][row].max()) + 1):
        at = torch.nonzero(batch["document"][row] == number)[:, 0]
        assert at.tolist() == list(range(int(at[0]), int(at[-1]) + 1))
        own = selection.take(batch["index"][row][at])
        (request,) = set(own.request)
        positions = batch["positions"][row][at].tolist()
        for place, position in zip(at.tolist(), positions, strict=True):
            assert int(batch["input_ids"][row][place]) == written.tokens[request, position]
            for tap, of_tap in zip(taps, values, strict=True):
                assert same(of_tap[row][place], written.rows[(request, position, tap)])
            phase = "prompt" if position < written.prompts[request] else "generated"
            counts = marks["loss"] in ("all", phase)
            counts &= not (marks["exclude"] and position == 0)
            assert bool(batch["loss_mask"][row][place]) == counts
        made.append((request, positions))
    return made


@settings(max_examples=rounds(suite=60, nightly=500))
@given(stores(), st.booleans(), st.permutations(TAPS), st.integers(1, 3), st.data())
def test_every_whole_completion_comes_once(tmp_path_factory, made, packed, order, count, data):
    written = Written(tmp_path_factory.mktemp("store"), made[0], **made[1])
    taps = [tap for tap in order[:count] if tap in written.store.select().taps]
    wanted = whole(written, taps) if taps else {}
    if not wanted:
        return
    length = data.draw(st.integers(1, 20))
    size = data.draw(st.integers(1, 5))
    marks = {
        "loss": data.draw(st.sampled_from(["all", "prompt", "generated"])),
        "exclude": data.draw(st.sampled_from([None, "first"])),
    }
    overflow = data.draw(st.sampled_from(["truncate", "split"]))
    options = {
        "join": taps,
        "length": length,
        "packed": packed,
        "overflow": overflow,
        "shuffle": data.draw(st.booleans()),
        "prefetch": data.draw(st.sampled_from([0, 2])),
        **marks,
    }
    dataset = SequenceDataset(written.store, size, **options)
    batches = list(dataset)
    assert len(batches) == len(dataset)
    pieces = []
    for batch in batches:
        shape = batch["input_ids"].shape
        assert shape[1] == length
        assert shape[0] <= size
        for row in range(shape[0]):
            own = documents(written, taps, batch, row, marks)
            assert packed or len(own) == 1
            pieces += own
    expected = []
    for request, positions in wanted.items():
        stop = len(positions) if overflow == "split" else length
        stop = min(stop, len(positions))
        expected += [
            (request, positions[at : min(at + length, stop)]) for at in range(0, stop, length)
        ]
    assert sorted(pieces) == sorted(expected)
    owners = {request for request, _ in written.joined(taps) | written.partial(taps)}
    assert dataset.skipped == len(owners) - len(wanted)
    beyond = sum(max(0, len(positions) - length) for positions in wanted.values())
    assert dataset.truncated == (beyond if overflow == "truncate" else 0)
    used = data.draw(st.integers(0, len(batches)))
    reading = iter(dataset)
    for _ in range(used):
        next(reading)
    again = SequenceDataset(written.store, size, **options)
    again.load_state_dict(json.loads(json.dumps(dataset.state_dict())))
    rest = [batch["index"].tolist() for batch in again]
    assert rest == [batch["index"].tolist() for batch in batches[used:]]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """60 completions of 1 to 20 tokens, in several shards."""
    made = [
        ({tap: list(range(1 + 7 * number % 20)) for tap in (A, B, D)}, 3) for number in range(60)
    ]
    return Written(tmp_path_factory.mktemp("many"), made, widths={D: 5}, shard_bytes=10_000)


def test_packed_rows_are_nearly_full_and_no_document_is_divided(written):
    dataset = SequenceDataset(written.store, 4, length=32, join=[A, B], packed=True)
    filled = rows = 0
    for batch in dataset:
        filled += int(batch["lengths"].sum())
        rows += len(batch["lengths"])
    assert filled == len(written.joined([A, B]))
    assert filled / (32 * rows) > 0.95
    assert dataset.truncated == dataset.skipped == 0


def test_taps_of_other_widths_come_by_name(written):
    batch = next(iter(SequenceDataset(written.store, 4, length=32, join=["resid_post.2", D])))
    shapes = {name: tuple(values.shape) for name, values in batch["values"].items()}
    assert shapes == {"resid_post.2": (4, 32, 8), "resid_post.31": (4, 32, 5)}


@pytest.mark.engine
def test_ranks_and_workers_divide_the_sequences(written):
    requests = []
    for rank in range(2):
        dataset = SequenceDataset(
            written.store, 7, length=24, join=[A], rank=rank, world_size=2, seed=rank * 0
        )
        batches = list(DataLoader(dataset, batch_size=None, num_workers=2))
        assert len(batches) == 5
        for batch in batches:
            requests += dataset.selection.take(batch["index"][:, 0]).request
    assert sorted(requests) == sorted(written.prompts)


def test_the_order_is_that_of_seed_and_epoch(written):
    def order(dataset):
        return [batch["index"].tolist() for batch in dataset]

    dataset = SequenceDataset(written.store, 7, length=24, join=[A], seed=3)
    first = order(dataset)
    assert order(dataset) == first
    dataset.set_epoch(1)
    assert order(dataset) != first
    assert order(SequenceDataset(written.store, 7, length=24, join=[A], seed=4)) != first


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"length": 0}, "length: expected 1 to 67108864, got 0"),
        ({"join": None}, "join: expected a list such as"),
        ({"overflow": "drop"}, "overflow: expected one of `truncate`, `split`, got 'drop'"),
        ({"loss": 3}, "loss: expected one of `all`, `prompt`, `generated`, got `int`"),
        ({"packed": 1}, "packed: expected `bool`, got `int`"),
    ],
)
def test_what_sequences_cannot_be_is_refused(written, options, problem):
    with pytest.raises(StoreError, match=problem):
        SequenceDataset(written.store, 4, **{"length": 8, "join": [A], **options})


def test_completions_with_gaps_alone_are_refused(tmp_path):
    write(
        tmp_path, [entry("a", positions=[0, 2], taps=[A]), entry("b", positions=[3, 5], taps=[A])]
    )
    with pytest.raises(StoreError, match="none of 2 completions has rows of consecutive tokens"):
        SequenceDataset(open_store(tmp_path), 4, length=8, join=[A])
