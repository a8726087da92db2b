"""Rows of several taps of the same token come together, each token once."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from torch.utils.data import DataLoader
from unit.store.making import entry, header, same, write
from unit.store.random_stores import TAPS, Written, stores, values_of

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import RowDataset

WORKERS = pytest.mark.engine  # processes that read
A, B, C, D = TAPS


def read(written, dataset, taps, batches):
    """Return the tokens of batches, each compared with what was written."""
    tokens = []
    for batch in batches:
        own = dataset.selection.take(batch["index"])
        assert [(tap, layer) for tap, layer in zip(own.site, own.layer.tolist(), strict=True)] == [
            taps[0]
        ] * len(own)
        values = values_of(batch, taps, written.head)
        assert "layer" not in batch
        for row, request in enumerate(own.request):
            token = request, int(batch["position"][row])
            assert int(own.position[row]) == token[1]
            assert int(batch["token_id"][row]) == written.tokens[token]
            for tap, of_tap in zip(taps, values, strict=True):
                assert same(of_tap[row], written.rows[(*token, tap)])
            tokens.append(token)
    return tokens


@settings(max_examples=rounds(suite=60, nightly=500))
@given(stores(), st.permutations(TAPS), st.integers(1, 4), st.data())
def test_every_token_with_all_taps_comes_once_with_the_rows_of_its_taps(
    tmp_path_factory, made, order, count, data
):
    written = Written(tmp_path_factory.mktemp("store"), made[0], **made[1])
    selection = written.store.select()
    taps = [tap for tap in order[:count] if tap in selection.taps]
    wanted = written.joined(taps) if taps else set()
    if not wanted:
        return
    options = {
        "join": taps,
        "shuffle": data.draw(st.booleans()),
        "prefetch": data.draw(st.sampled_from([0, 3])),
        "checksums": data.draw(st.booleans()),
        "buffer": data.draw(st.integers(1, 60)),
    }
    size = data.draw(st.integers(1, 40))
    ranks = data.draw(st.integers(1, min(3, len(wanted))))
    excluded = data.draw(st.sampled_from([None, "first"]))
    if excluded:
        wanted = {token for token in wanted if token[1]}
    if len(wanted) < ranks or (size == 1 and len(wanted) % ranks):
        return
    tokens, lengths = [], set()
    for rank in range(ranks):
        dataset = RowDataset(
            selection, size, rank=rank, world_size=ranks, exclude=excluded, **options
        )
        assert dataset.skipped == len(written.partial(taps))
        batches = list(dataset)
        used = data.draw(st.integers(0, len(batches)))
        lengths.add(len(batches))
        tokens += read(written, dataset, taps, batches)
        # Interrupted after any batch, the epoch goes on with the next.
        first = iter(dataset)
        before = [next(first) for _ in range(used)]
        state = json.loads(json.dumps(dataset.state_dict()))
        assert state["batches"] == used
        again = RowDataset(
            selection, size, rank=rank, world_size=ranks, exclude=excluded, **options
        )
        again.load_state_dict(state)
        seen = [batch["index"].tolist() for batch in (*before, *again)]
        assert seen == [batch["index"].tolist() for batch in batches]
        assert len(again) == len(batches)
    assert len(lengths) == 1
    assert sorted(tokens) == sorted(wanted)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """1500 tokens of 25 requests; some lack B, some have C at other positions than A."""
    made = []
    for number in range(25):
        positions = {tap: list(range(60)) for tap in (A, B, D)}
        positions[C] = list(range(number % 3, 60, 2))
        if number % 7 == 3:
            del positions[B]
        made.append((positions, 30))
    return Written(tmp_path_factory.mktemp("many"), made, shard_bytes=20_000)


def test_taps_that_are_stored_at_other_positions_are_aligned(written):
    assert len(written.store.shards) > 2
    taps = [C, A, B]
    dataset = RowDataset(written.store, 64, join=taps, buffer=256)
    assert sorted(read(written, dataset, taps, dataset)) == sorted(written.joined(taps))
    assert dataset.skipped == len(written.partial(taps)) > 100


def test_taps_may_be_named_in_any_spelling(written):
    dataset = RowDataset(
        written.store, 8, join=["resid_post.2", "blocks.12.mlp.hook_in", ("mlp_out", 12)]
    )
    assert next(iter(dataset))["values"].shape == (8, 3, 8)
    assert RowDataset(written.store, 8, join=[A]).batch_size == 8
    assert next(iter(RowDataset(written.store, 8, join=[A])))["values"].shape == (8, 1, 8)


@WORKERS
@pytest.mark.parametrize(("workers", "used"), [(1, 3), (2, 0), (2, 3), (3, 5)])
def test_a_loader_with_workers_goes_on_where_it_was_stopped(written, workers, used):
    def loader():
        dataset = RowDataset(written.store, 64, join=[A, C], buffer=256, seed=1)
        dataset.set_epoch(2)
        return dataset, DataLoader(dataset, batch_size=None, num_workers=workers)

    dataset, loading = loader()
    every = list(loading)
    assert len(every) == len(loading) == len(dataset)
    assert sorted(read(written, dataset, [A, C], every)) == sorted(written.joined([A, C]))
    state = json.loads(json.dumps(dataset.state_dict(batches=used)))
    resumed, loading = loader()
    resumed.load_state_dict(state)
    rest = [batch["index"].tolist() for batch in loading]
    assert rest == [batch["index"].tolist() for batch in every[used:]]
    resumed.set_epoch(3)
    assert len(list(loading)) == len(every)


@WORKERS
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_stateful_loader_goes_on_where_it_was_stopped(written, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader():
        dataset = RowDataset(written.store, 64, join=[A, C], buffer=256)
        return stateful(dataset, batch_size=None, num_workers=workers)

    every = [batch["index"].tolist() for batch in loader()]
    for used in (1, 4, len(every) - 1):
        before = loader()
        reading = iter(before)
        seen = [next(reading)["index"].tolist() for _ in range(used)]
        state = before.state_dict()
        after = loader()
        after.load_state_dict(state)
        seen += [batch["index"].tolist() for batch in after]
        assert seen == every


def test_ranks_are_those_of_torch_distributed(written, monkeypatch):
    ranks = torch.distributed
    monkeypatch.setattr(ranks, "is_initialized", lambda: True)
    monkeypatch.setattr(ranks, "get_world_size", lambda: 3)
    indices = []
    for rank in range(3):
        monkeypatch.setattr(ranks, "get_rank", lambda rank=rank: rank)
        dataset = RowDataset(written.store, 100, join=[A, C])
        indices += [index for batch in dataset for index in batch["index"].tolist()]
    assert len(indices) == len(set(indices)) == len(written.joined([A, C]))


def test_every_batch_is_full_with_drop_last(written):
    count = len(written.joined([A, B]))
    seen = set()
    for epoch in range(6):
        for rank in range(2):
            dataset = RowDataset(
                written.store, 90, join=[A, B], drop_last=True, rank=rank, world_size=2
            )
            dataset.set_epoch(epoch)
            batches = [batch["index"].tolist() for batch in dataset]
            assert [len(batch) for batch in batches] == [90] * (count // 180)
            seen.update(index for batch in batches for index in batch)
    assert len(seen) == count  # other rows are left out in each epoch


def test_a_damaged_row_is_refused_unless_checksums_are_off(tmp_path):
    write(tmp_path, [entry("a", rows=9000, taps=[A, D])])
    (path,) = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[len(data) - 9000 * 8] ^= 1  # of the last tap
    path.write_bytes(data)
    for prefetch in (0, 4):
        dataset = RowDataset(open_store(tmp_path), 500, join=[A, D], prefetch=prefetch)
        with pytest.raises(StoreError, match=r"damaged: .* does not match its checksum"):
            list(dataset)
        unchecked = RowDataset(
            open_store(tmp_path), 500, join=[A, D], prefetch=prefetch, checksums=False
        )
        assert sum(len(batch["index"]) for batch in unchecked) == 9000


def test_memory_is_pinned_where_there_is_a_device(written, monkeypatch):
    assert (
        not next(iter(RowDataset(written.store, 8, join=[A], pin_memory=True)))[
            "values"
        ].is_pinned()
        or torch.cuda.is_available()
    )
    # A worker cannot pin memory, whatever the device.
    monkeypatch.setattr("midstream.store.row_memory.get_worker_info", lambda: object())
    with pytest.raises(StoreError, match="pin_memory: a loader's worker cannot pin memory"):
        next(iter(RowDataset(written.store, 8, join=[A], pin_memory=True)))


def test_reading_ahead_holds_no_more_batches_than_it_may(written, monkeypatch):
    started = []
    dataset = RowDataset(written.store, 10, join=[A, B], prefetch=3)
    read_items = type(dataset._source).read
    monkeypatch.setattr(
        type(dataset._source),
        "read",
        lambda *window: (started.append(1), read_items(*window))[1],
    )
    reading = iter(dataset)
    for used in range(1, 6):
        next(reading)
        assert len(started) <= used + 3
    reading.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_object_store_is_read_a_buffer_at_a_time(written, monkeypatch, prefetch):
    """Rows that are far apart cost a request each there."""

    def dataset():
        return RowDataset(written.store, 50, join=[A, D], buffer=200, seed=2, prefetch=prefetch)

    expected = list(dataset())
    sizes = []
    monkeypatch.setattr("midstream.store.tokens.Tokens.is_mapped", False)
    source = dataset()._source
    read_items = type(source).read
    monkeypatch.setattr(
        type(source),
        "read",
        lambda source, window, first, last: (
            sizes.append(last - first),
            read_items(source, window, first, last),
        )[1],
    )
    batches = list(dataset())
    # Threads may begin the last window, which is smaller, before the window in front of it.
    whole_windows = sorted(sizes)[1:]
    assert whole_windows
    assert set(whole_windows) == {200}
    assert sum(sizes) == sum(len(batch["index"]) for batch in expected)
    assert len(batches) == len(expected)
    for batch, other in zip(batches, expected, strict=True):
        assert batch.keys() == other.keys()
        for name, values in batch.items():
            assert same(values, other[name])
            assert values.untyped_storage().nbytes() == values.nbytes


@WORKERS
def test_workers_may_be_spawned(written):
    dataset = RowDataset(written.store, 64, join=[A, C], seed=1)
    spawned = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    indices = [batch["index"].tolist() for batch in spawned]
    assert indices == [batch["index"].tolist() for batch in dataset]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"join": "resid_post"}, r'join: expected a list such as \[\("resid_post", 2\)\], got'),
        ({"join": []}, "join: expected a list such as"),
        ({"join": [("resid_post", 7)]}, r"join: no rows of resid_post\.7; the selection has"),
        ({"join": [("resid_pst", 2)]}, "join: expected pairs of site and layer"),
        ({"join": ["resid_post"]}, "join: expected pairs of site and layer"),
        ({"join": [A, A]}, r"join: resid_post\.2 is listed twice"),
        ({"exclude": "last"}, "exclude: expected .first. or None, got 'last'"),
        ({"rank": 1}, "rank: expected both of rank and world_size"),
        ({"rank": 2, "world_size": 2}, "rank: expected 0 to 1, got 2"),
        ({"rank": 0, "world_size": 10**6}, "drop_last: expected True: "),
        ({"prefetch": -1}, "prefetch: expected 0 to 1024, got -1"),
        ({"drop_last": 1}, "drop_last: expected `bool`, got `int`"),
    ],
)
def test_what_cannot_be_joined_is_refused(written, options, problem):
    with pytest.raises(StoreError, match=problem):
        RowDataset(written.store, 8, **options)


def test_taps_without_a_token_in_common_are_refused(tmp_path):
    write(tmp_path, [entry("a", taps=[A]), entry("b", taps=[D])])
    with pytest.raises(StoreError, match=r"join: none of 6 tokens has rows at all of"):
        RowDataset(open_store(tmp_path), 8, join=[A, D])
    head = header(model="other", widths={D: 5})
    write(tmp_path, [entry("c", taps=[A, D], head=head)], head)
    write(tmp_path, [entry("d", taps=[A, D])])
    with pytest.raises(StoreError, match=r"the rows of resid_post\.31 differ in width: "):
        RowDataset(open_store(tmp_path), 8, join=[A, D])
