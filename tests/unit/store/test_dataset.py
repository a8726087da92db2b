"""An epoch has every row once, whoever reads it."""

from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader
from unit.store.making import entry, header, same, write

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import RowDataset

WORKERS = pytest.mark.engine  # processes that read
TAPS = (("resid_pre", 0), ("resid_post", 3))


@pytest.fixture(scope="module")
def selection(tmp_path_factory):
    """2380 rows of 17 requests, in several shards."""
    root = tmp_path_factory.mktemp("store")
    entries = [entry(f"r{i}", rows=10 * i - 10, seed=i, taps=TAPS) for i in range(1, 18)]
    write(root, entries, shard_bytes=10_000)
    assert len(open_store(root).shards) > 2
    return open_store(root).select()


def epoch(dataset, workers=0, **options):
    """Indices of the rows in the order in which a loader gives them, batch by batch."""
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, **options)
    return [batch["index"].tolist() for batch in loader]


def flat(batches):
    return [index for batch in batches for index in batch]


@pytest.mark.parametrize("workers", [0, *(pytest.param(n, marks=WORKERS) for n in (1, 3))])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_comes_once_whatever_the_number_of_workers(selection, workers, shuffle):
    dataset = RowDataset(selection, 100, shuffle=shuffle, buffer=512)
    batches = epoch(dataset, workers)
    found = flat(batches)
    assert (found if workers + shuffle == 0 else sorted(found)) == list(range(len(selection)))
    sizes = Counter(map(len, batches))
    assert sum(count for size, count in sizes.items() if size != 100) <= max(1, workers)


def test_a_selection_of_no_rows_has_no_batches(selection, tmp_path):
    write(tmp_path, [entry("a", rows=0)])
    for workers in (0, 2):
        assert epoch(RowDataset(open_store(tmp_path).select(), 10), workers) == []


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=WORKERS)])
def test_each_row_comes_with_what_belongs_to_it(selection, workers):
    dataset = RowDataset(selection, 64)
    for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
        expected = selection.take(batch["index"])
        assert same(batch["values"], expected.values)
        for name in ("layer", "position", "token_id"):
            assert batch[name].dtype == torch.int64
            assert torch.equal(batch[name], getattr(expected, name))


def test_rows_of_a_codec_come_decoded(tmp_path):
    head = header(codec="full8")
    write(tmp_path, [entry("a", rows=20, head=head)], head)
    selection = open_store(tmp_path).select(layer=3)
    (batch,) = RowDataset(selection, 20, shuffle=False)
    assert batch["values"].dtype == torch.float32
    assert same(batch["values"], selection.take(range(20)).values)


def test_a_batch_does_not_hold_the_whole_buffer(selection):
    batch = next(iter(RowDataset(selection, 8)))
    assert batch["values"].untyped_storage().nbytes() == 8 * 8 * 2


@WORKERS
def test_the_order_follows_from_seed_epoch_and_number_of_workers(selection):
    dataset = RowDataset(selection, 50, buffer=512, seed=5)
    first = epoch(dataset)
    assert epoch(dataset) == first
    assert epoch(RowDataset(selection, 50, buffer=512, seed=5)) == first
    assert epoch(RowDataset(selection, 50, buffer=512, seed=6)) != first
    dataset.set_epoch(1)
    second = epoch(dataset)
    assert second != first
    assert epoch(dataset, 3) == epoch(dataset, 3)
    dataset.set_epoch(0)
    assert epoch(dataset) == first


@WORKERS
def test_workers_that_live_on_are_told_of_the_epoch(selection):
    dataset = RowDataset(selection, 50, buffer=512)
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    orders = []
    for number in (0, 1, 0):
        dataset.set_epoch(number)
        orders.append([batch["index"].tolist() for batch in loader])
    assert orders[0] == orders[2] != orders[1]
    assert sorted(flat(orders[1])) == list(range(len(selection)))


def test_a_shuffled_batch_is_drawn_from_as_many_rows_as_the_buffer_has(selection):
    batches = epoch(RowDataset(selection, 200, buffer=10**6))
    for batch in batches[:-1]:
        assert abs(sum(batch) / len(batch) / len(selection) - 0.5) < 5 * 0.29 / len(batch) ** 0.5
        assert batch != sorted(batch)
    batches = epoch(RowDataset(selection, 64, buffer=512))
    runs = [len({index // 256 for index in batch}) for batch in batches]
    # Two runs, and what was left of the two before.
    assert max(runs) <= 4
    assert sum(count > 1 for count in runs) > len(runs) / 2
    # And the runs are not in the order of the selection.
    buffers = [sorted(batch)[len(batch) // 2] // 512 for batch in batches]
    assert buffers != sorted(buffers)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"batch_size": 0}, "batch_size: expected 1 to 2147483647, got 0"),
        ({"batch_size": 1.0}, "batch_size: expected `int`, got `float`"),
        ({"batch_size": 1, "buffer": 0}, "buffer: expected 1 to"),
        ({"batch_size": 1, "seed": -1}, "seed: expected 0 to"),
    ],
)
def test_numbers_out_of_range_are_refused(selection, options, problem):
    with pytest.raises(StoreError, match=problem):
        RowDataset(selection, **options)
    with pytest.raises(StoreError, match="epoch: expected 0 to"):
        RowDataset(selection, 1).set_epoch(-1)
