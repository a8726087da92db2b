"""Stores are verified, merged and pruned, and nothing is lost on the way."""

import os
import pickle
import shutil
import time

import pytest
from unit.store.making import TAPS, entry, header, ids, same, vectors, write

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import merge, prune, verify
from midstream.store.backends.local import LocalFolder, temporary_name


def names(root):
    return sorted(path.name for path in root.glob("*.safetensors"))


def seeded(numbers, **fields):
    return [entry(f"r{i}", seed=i, rows=1 + i % 4, **fields) for i in numbers]


def check_values(root, numbers):
    store = open_store(root)
    for i in numbers:
        found = store.get(f"r{i}")
        for n, tap in enumerate(TAPS):
            assert same(found[tap], vectors(i + n, 1 + i % 4, header()))
            assert found.positions.tolist() == list(range(1 + i % 4))
            assert found.token_ids.tolist() == [10 * p + 1 for p in range(1 + i % 4)]


def damage(root, name):
    """Flips a bit of the first row's position."""
    data = bytearray((root / name).read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    (root / name).write_bytes(data)


class Crash(BaseException):
    """Stands for the end of the process."""


def crashing(monkeypatch, method, after):
    """Makes the process end at call `after` of a method of LocalFolder, before it does anything."""
    real, calls = getattr(LocalFolder, method), []

    def wrapper(self, *args):
        calls.append(args)
        if len(calls) > after:
            raise Crash
        return real(self, *args)

    monkeypatch.setattr(LocalFolder, method, wrapper)


def test_every_shard_that_is_wrong_is_named_with_a_reason(tmp_path):
    for i in range(4):
        write(tmp_path, seeded([i]))
    first, second, third, _ = names(tmp_path)
    damage(tmp_path, first)
    (tmp_path / second).write_bytes((tmp_path / second).read_bytes()[:-1])
    (tmp_path / third).write_bytes(b"")
    found = verify(tmp_path)
    assert not found.ok
    assert [each.shard for each in found.findings] == [first, second, third]
    problems = [each.problem for each in found.findings]
    assert problems[0].startswith("damaged: g0.position")
    assert problems[1].startswith("truncated: ")
    assert problems[2].startswith("truncated: ")
    assert (found.shards, found.requests) == (4, 1)
    assert f"\n{second}: truncated" in str(found)


def test_a_store_that_is_right_or_empty_is_found_to_be(tmp_path):
    assert verify(tmp_path).ok
    with pytest.raises(StoreError, match="no such store"):
        verify(tmp_path / "nowhere")
    for i in range(3):
        write(tmp_path, seeded([2 * i, 2 * i + 1], metadata={"i": i}))
    found = verify(tmp_path)
    assert found.ok
    assert (found.shards, found.requests, found.findings) == (3, 6, ())
    assert found.nbytes == open_store(tmp_path).nbytes
    assert str(found).startswith(f"{tmp_path}: 3 of 3 shards are intact, 6 requests, ")


def test_small_shards_become_one(tmp_path):
    for i in range(7):
        write(tmp_path, seeded([i], tag=f"t{i % 2}", metadata={"i": i}))
    before = open_store(tmp_path)
    order = [each.request for each in before.requests]
    (name,) = merge(tmp_path, tmp_path)
    assert names(tmp_path) == [name]
    check_values(tmp_path, range(7))
    after = open_store(tmp_path)
    assert [each.request for each in after.requests] == order
    assert [each.metadata for each in after.requests] == [{"i": i} for i in range(7)]
    assert [each.tag for each in after.requests] == [f"t{i % 2}" for i in range(7)]
    assert verify(tmp_path).ok
    assert merge(tmp_path, tmp_path) == [], "there is nothing left to do"


def test_shards_are_merged_up_to_a_size_and_large_ones_left_alone(tmp_path):
    for i in range(8):
        write(tmp_path, seeded([4 * i, 4 * i + 1]))
    write(tmp_path, [entry("large", rows=300)])
    large = names(tmp_path)[-1]
    merge(tmp_path, tmp_path, shard_bytes=8000)
    sizes = {name: (tmp_path / name).stat().st_size for name in names(tmp_path)}
    assert large in sizes
    assert 2 < len(sizes) < 9
    assert max(size for name, size in sizes.items() if name != large) <= 8000
    assert len(ids(tmp_path)) == 17


def test_shards_of_different_headers_and_doubles_stay_apart(tmp_path):
    write(tmp_path, seeded([0]))
    write(tmp_path, seeded([1]), header(model="other"))
    write(tmp_path, seeded([0, 2]))
    write(tmp_path, seeded([3]), header(model="other"))
    merge(tmp_path, tmp_path)
    assert ids(tmp_path) == [(f"r{i}", 0) for i in (0, 0, 1, 2, 3)]
    assert len(names(tmp_path)) == 3
    assert open_store(tmp_path).models == ("acme/tiny", "other")


def test_several_stores_become_one_and_stay_as_they_are(tmp_path):
    for n in range(3):
        write(tmp_path / str(n), seeded([2 * n]))
        write(tmp_path / str(n), seeded([2 * n + 1]))
    sources = [tmp_path / str(n) for n in range(3)]
    before = [names(source) for source in sources]
    merge(sources, tmp_path / "all")
    assert [names(source) for source in sources] == before
    check_values(tmp_path / "all", range(6))
    assert len(names(tmp_path / "all")) == 1
    assert verify(tmp_path / "all").ok


def test_what_was_merged_is_not_merged_again(tmp_path):
    into = tmp_path / "all"
    write(tmp_path / "a", seeded([0, 1]))
    write(tmp_path / "a", [entry("large", rows=300)])
    merge(tmp_path / "a", into, shard_bytes=8000)
    write(tmp_path / "a", seeded([2]))
    merge([tmp_path / "a", tmp_path / "a"], into, shard_bytes=8000)
    merge(into, into)
    merge(tmp_path / "a", into)
    assert ids(into) == [("large", 0), ("r0", 0), ("r1", 0), ("r2", 0)]
    assert verify(into).ok


def test_a_part_that_a_source_takes_the_place_of_is_not_merged_as_well(tmp_path):
    into = tmp_path / "all"
    write(tmp_path / "a", seeded([0]))
    merge(tmp_path / "a", into)
    write(into, seeded([7]))
    write(tmp_path / "a", seeded([1]))
    merge(tmp_path / "a", tmp_path / "a")
    merge([into, tmp_path / "a", into], into)
    assert ids(into) == [("r0", 0), ("r1", 0), ("r7", 0)]
    check_values(into, [0, 1, 7])
    assert len(names(into)) == 1


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_part_that_a_later_source_takes_the_place_of_is_not_merged_beside_it(tmp_path, order):
    write(tmp_path / "a", seeded([0]))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    write(tmp_path / "a", seeded([5]))  # the part goes into one shard with this
    write(tmp_path / "b", seeded([1]))
    merge(tmp_path / "b", tmp_path / "b")
    write(tmp_path / "b", seeded([6]))
    into = tmp_path / "all"
    new = merge([tmp_path / one for one in order], into)
    assert ids(into) == [("r0", 0), ("r1", 0), ("r5", 0), ("r6", 0)]
    check_values(into, [0, 1, 5, 6])
    assert set(new) <= set(names(into))
    assert verify(into).ok


def test_a_source_that_is_part_here_and_part_not_is_refused(tmp_path):
    into = tmp_path / "all"
    write(tmp_path / "a", seeded([0]))
    write(tmp_path / "b", seeded([5]))
    merge([tmp_path / "a", tmp_path / "b"], into)
    write(tmp_path / "a", seeded([1]))
    merge(tmp_path / "a", tmp_path / "a")
    with pytest.raises(StoreError, match="only some of its requests were merged into .* before"):
        merge(tmp_path / "a", into)
    assert ids(into) == [("r0", 0), ("r5", 0)]


def test_what_was_pruned_from_a_source_stays_where_it_was_merged(tmp_path):
    write(tmp_path / "a", seeded([0, 1]))
    merge(tmp_path / "a", tmp_path / "all")
    prune(tmp_path / "a", requests=["r0"])
    merge(tmp_path / "a", tmp_path / "all")
    assert ids(tmp_path / "all") == [("r0", 0), ("r1", 0)]


def test_a_source_that_is_not_there_is_refused_before_anything_is_made(tmp_path):
    write(tmp_path / "a", seeded([0]))
    with pytest.raises(StoreError, match="nowhere: no such store"):
        merge([tmp_path / "a", tmp_path / "nowhere"], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_a_damaged_shard_is_not_merged(tmp_path):
    write(tmp_path, seeded([0]))
    write(tmp_path, seeded([1]))
    damage(tmp_path, names(tmp_path)[1])
    before = names(tmp_path)
    with pytest.raises(StoreError, match=f"{before[1]}: damaged"):
        merge(tmp_path, tmp_path)
    assert names(tmp_path) == before


@pytest.mark.parametrize(
    ("method", "after"), [*(("put", n) for n in range(3)), *(("delete", n) for n in range(6))]
)
def test_a_merge_that_ends_at_any_instant_loses_and_doubles_nothing(
    tmp_path, monkeypatch, method, after
):
    for i in range(6):
        write(tmp_path / "a", seeded([i]))
        write(tmp_path / "b", seeded([10 + i]))
    everything = [*range(6), *range(10, 16)]
    with monkeypatch.context() as patched:
        crashing(patched, method, after)
        with pytest.raises(Crash):
            merge([tmp_path / "a", tmp_path / "b"], tmp_path / "a", shard_bytes=6000)
    found = ids(tmp_path / "a")
    assert len(found) == len(set(found)), "nothing is there twice"
    assert set(found) >= {(f"r{i}", 0) for i in range(6)}
    check_values(tmp_path / "a", [int(name[1:]) for name, _ in found])
    assert verify(tmp_path / "a").ok
    merge([tmp_path / "a", tmp_path / "b"], tmp_path / "a", shard_bytes=6000)
    assert ids(tmp_path / "a") == sorted((f"r{i}", 0) for i in everything)
    check_values(tmp_path / "a", everything)
    replaced = {
        name for shard in open_store(tmp_path / "a").shards for name in shard.layout.replaces
    }
    assert not replaced & set(names(tmp_path / "a"))


def test_what_a_damaged_shard_stands_for_is_not_deleted(tmp_path, monkeypatch):
    for i in range(2):  # so long that opening a shard does not look at its first rows
        write(tmp_path, [entry(f"r{i}", seed=i, rows=4000)])
    with monkeypatch.context() as patched:
        crashing(patched, "delete", 0)
        with pytest.raises(Crash):
            merge(tmp_path, tmp_path)
    (merged,) = (shard.name for shard in open_store(tmp_path).shards)
    damage(tmp_path, merged)
    before = names(tmp_path)
    for upkeep in (lambda: merge(tmp_path, tmp_path), lambda: prune(tmp_path)):
        with pytest.raises(StoreError, match=f"{merged}: damaged"):
            upkeep()
        assert names(tmp_path) == before
    assert prune(tmp_path, damaged=True).damaged == (merged,)
    assert ids(tmp_path) == [("r0", 0), ("r1", 0)]
    assert verify(tmp_path).ok


def test_a_reader_that_had_the_store_open_is_told_to_look_again(tmp_path):
    for i in range(3):
        write(tmp_path, seeded([i]))
    store = open_store(tmp_path)
    assert len(store) == 3
    merge(tmp_path, tmp_path)
    assert same(store.get("r0")[TAPS[0]], vectors(0, 1, header())), "what is mapped stays"
    store = pickle.loads(pickle.dumps(store))
    with pytest.raises(StoreError, match="the shard was removed, call `refresh`"):
        store.get("r0")
    store.refresh()
    assert len(store) == 3
    assert same(store.get("r1")[TAPS[0]], vectors(1, 2, header()))


def test_a_store_that_is_merged_while_it_is_opened_is_seen_whole(tmp_path):
    for i in range(3):
        write(tmp_path, seeded([i]))
    store = open_store(tmp_path)  # reads the names alone
    merge(tmp_path, tmp_path)
    assert [each.request for each in store.requests] == ["r0", "r1", "r2"]


def test_one_merge_or_prune_at_a_time_and_none_into_an_object_store(tmp_path, monkeypatch):
    write(tmp_path, seeded([0]))
    with LocalFolder(str(tmp_path)).exclusive():
        for call in (lambda: merge(tmp_path, tmp_path), lambda: prune(tmp_path)):
            with pytest.raises(StoreError, match="another merge or prune is running"):
                call()
    prune(tmp_path)
    monkeypatch.setattr("midstream.store.backends.local.folder_of", lambda root: f"{root}")
    with pytest.raises(
        StoreError, match="s3://bucket: unsupported here; expected a local directory"
    ):
        merge(tmp_path, "s3://bucket")


def test_duplicates_of_a_store_that_cannot_be_pruned_are_removed_from_its_merged_copy(
    tmp_path, monkeypatch
):
    source, copy = tmp_path / "source", tmp_path / "copy"
    for seed in (1, 2, 3):
        write(source, [entry("a", seed=seed, rows=2), entry(f"b{seed}", seed=seed, rows=1)])
    merge(source, copy)
    assert [one.request for one in open_store(copy).requests].count("a") == 3
    assert prune(copy, duplicates=True).requests == (("a", 0), ("a", 0))
    assert same(open_store(copy).get("a")[TAPS[0]], vectors(3, 2, header()))
    assert len(open_store(copy)) == 4
    monkeypatch.setattr("midstream.store.backends.local.folder_of", lambda root: f"{root}")
    with pytest.raises(StoreError, match="`midstream store merge s3://bucket --into DIR` copies"):
        prune("s3://bucket", duplicates=True)


def test_only_temporaries_that_are_old_are_removed(tmp_path):
    write(tmp_path, seeded([0]))
    name = names(tmp_path)[0]
    old, new, other = (
        tmp_path / temporary_name(f"{prefix}{name}") for prefix in ("old-", "new-", "")
    )
    other = tmp_path / ".somebody.tmp"
    for path in (old, new, other):
        path.write_bytes(b"half a shard")
    long_ago = time.time() - 4000
    for path in (old, other):
        os.utime(path, (long_ago, long_ago))
    assert len(open_store(tmp_path)) == 1, "temporaries are no shards"
    assert verify(tmp_path).ok
    assert prune(tmp_path).temporaries == (old.name,)
    assert new.exists()
    assert other.exists(), "it is not ours"
    assert prune(tmp_path, older_than_s=0).temporaries == (new.name,)
    assert ids(tmp_path) == [("r0", 0)]


def test_shards_that_are_not_right_are_set_aside_when_asked(tmp_path):
    for i in range(3):
        write(tmp_path, seeded([i]))
    bad = names(tmp_path)[1]
    damage(tmp_path, bad)
    before = (tmp_path / bad).read_bytes()
    with pytest.raises(StoreError, match=f"{bad}: damaged"):
        prune(tmp_path, tags=["x"])
    found = prune(tmp_path, damaged=True)
    assert found.damaged == (bad,)
    assert (tmp_path / f"{bad}.damaged").read_bytes() == before
    assert ids(tmp_path) == [("r0", 0), ("r2", 0)]
    assert prune(tmp_path, damaged=True).damaged == ()


def test_requests_are_removed_by_id_and_tag(tmp_path):
    write(tmp_path, [*seeded(range(3), tag="keep"), *seeded([3, 4], tag="drop")])
    write(tmp_path, [*seeded([5], tag="drop"), entry("r5", child=1, tag="keep")])
    write(tmp_path, seeded([6], tag="drop"))
    found = prune(tmp_path, tags=["drop"], requests=["r0"])
    assert found.requests == (("r0", 0), ("r3", 0), ("r4", 0), ("r5", 0), ("r6", 0))
    assert ids(tmp_path) == [("r1", 0), ("r2", 0), ("r5", 1)]
    assert len(names(tmp_path)) == 2
    check_values(tmp_path, [1, 2])
    assert verify(tmp_path).ok
    assert prune(tmp_path).requests == ()


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"requests": ["r0", "r9"]}, "request: no rows in this store have 'r9'"),
        ({"tags": ["x"]}, "tag: no rows in this store have 'x'"),
        ({"requests": "r0"}, "requests: expected a list, got `str`"),
        ({"tags": ["x", 5]}, r"tags\[1\]: expected `str`, got `int`"),
        ({"requests": [["r0"]]}, r"requests\[0\]: expected `str`, got `list`"),
        ({"damaged": "no"}, "damaged: expected `bool`, got `str`"),
        ({"older_than_s": "1h"}, "older_than_s: expected a number of seconds, got `str`"),
        ({"older_than_s": float("nan")}, "older_than_s: expected a number of seconds, got nan"),
    ],
)
def test_what_cannot_be_pruned_is_refused_by_name(tmp_path, asked, problem):
    write(tmp_path, seeded([0]))
    with pytest.raises(StoreError, match=problem):
        prune(tmp_path, **asked)
    assert ids(tmp_path) == [("r0", 0)]


@pytest.mark.parametrize(
    ("sources", "size", "problem"),
    [
        (".", "x", "shard_bytes: expected `int`, got `str`"),
        (".", 0, "shard_bytes: expected at least 1, got 0"),
        (None, 1000, "sources: expected a path or a list of them, got `None`"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(tmp_path, sources, size, problem):
    write(tmp_path, seeded([0]))
    with pytest.raises(StoreError, match=problem):
        merge(None if sources is None else tmp_path / sources, tmp_path / "into", shard_bytes=size)
    assert not (tmp_path / "into").exists()


@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("method", ["put", "delete"])
def test_a_prune_that_ends_at_any_instant_loses_nothing_else(tmp_path, monkeypatch, method, after):
    for i in range(3):
        write(tmp_path, seeded([2 * i, 2 * i + 1]))
    with monkeypatch.context() as patched:
        crashing(patched, method, after)
        with pytest.raises(Crash):
            prune(tmp_path, requests=["r0", "r2", "r4"])
    found = ids(tmp_path)
    assert len(found) == len(set(found))
    assert set(found) >= {("r1", 0), ("r3", 0), ("r5", 0)}
    left = [name for name, _ in found if name in ("r0", "r2", "r4")]
    prune(tmp_path, requests=left)
    assert ids(tmp_path) == [("r1", 0), ("r3", 0), ("r5", 0)]
    assert len(names(tmp_path)) == 3
    check_values(tmp_path, [1, 3, 5])
