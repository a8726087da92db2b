"""What is written is read back, chosen and counted."""

import pytest
from unit.store.making import TAPS, entry, header, same, vectors, write

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import Writer


def test_what_was_added_is_there_bit_by_bit(tmp_path):
    write(tmp_path, [entry("a", rows=3), entry("b", rows=5, seed=50)])
    store = open_store(tmp_path)
    for request, seed, rows in (("a", 0, 3), ("b", 50, 5)):
        found = store.get(request)
        assert found.keys() == TAPS
        for i, tap in enumerate(TAPS):
            assert same(found[tap], vectors(seed + i, rows, header()))
        assert found.positions.tolist() == list(range(rows))
        assert found.token_ids.tolist() == [10 * p + 1 for p in range(rows)]


@pytest.mark.parametrize(
    "codec", ["raw", "cast:dtype=float16", "full8", "rp8:k=64,seed=3", "topk8:k=4"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_codec_and_dtype_reads_as_its_codec_decodes(tmp_path, codec, dtype):
    head = header(codec=codec, dtype=dtype, hidden_size=96)
    write(tmp_path, [entry("a", rows=4, head=head)], head)
    store = open_store(tmp_path)
    tap = TAPS[1]
    wanted = entry("a", rows=4, head=head).taps[tap].data
    decoded = head.open_codec().decode(wanted, 96, head.torch_dtype)
    assert same(store.get("a").encoded(*tap), wanted)
    assert same(store.get("a")[tap], decoded)
    (batch,) = store.select(site=tap[0], layer=tap[1]).batches(10)
    assert same(batch.encoded, wanted)
    assert same(batch.values, decoded)


def test_a_directory_without_shards_is_an_empty_store_and_one_that_is_not_there_is_refused(
    tmp_path,
):
    store = open_store(tmp_path)
    assert len(store) == 0
    assert store.requests == ()
    assert repr(store) == f"Store({str(tmp_path)!r}, empty)"
    with pytest.raises(StoreError, match="nowhere: no such store: the directory does not exist"):
        open_store(tmp_path / "nowhere")
    for since in (None, 5):
        with pytest.raises(StoreError, match="since: expected the name of a shard"):
            open_store(tmp_path, since)


def test_shards_that_come_later_are_seen_after_refresh(tmp_path):
    with Writer(tmp_path, header()) as writer:
        writer.add(entry("a"))
        store = open_store(tmp_path)
        assert "a" not in store
        writer.flush()
        assert "a" not in store
        store.refresh()
        assert "a" in store
        assert ("a", 1) not in store


def test_values_belong_to_the_caller(tmp_path):
    write(tmp_path, [entry("a")])
    store = open_store(tmp_path)
    store.get("a")[TAPS[0]].zero_()
    assert same(store.get("a")[TAPS[0]], vectors(0, 3, header()))
    store.get("a").positions.zero_()
    assert store.get("a").positions.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"request": 5}, "request: expected `str`, got `int`"),
        ({"request": "a", "child": "0"}, "child: expected `int`, got `str`"),
        ({"request": "a", "shard": 1}, "shard: expected the name of a shard, got `int`"),
    ],
)
def test_what_is_no_id_is_refused_by_name(tmp_path, given, problem):
    for find in (open_store(tmp_path).find, open_store(tmp_path).get):
        with pytest.raises(StoreError, match=problem):
            find(**given)
