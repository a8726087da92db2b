"""The ids of a store are those that a reader finds, after every write, merge and prune."""

import tempfile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from unit.store.making import entry, header

from midstream.errors import StoreError
from midstream.store import Writer, merge, open_store, prune, stored_ids
from midstream.store.backends.local import folder_of
from midstream.store.format.shard import Shard
from midstream.store.stored_ids import StoredIds

IDS = [f"r{nth}" for nth in range(6)]
NAMES = st.lists(st.sampled_from(IDS), min_size=1, max_size=3, unique=True)
STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "write own", "merge", "prune", "look"]), NAMES), max_size=6
)


@given(STEPS, st.sampled_from([1, 1 << 16]), st.booleans())
@example([], 1 << 16, True)
def test_an_id_is_there_if_and_only_if_a_reader_finds_it(steps, unsorted, looks_always):
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patched:
        patched.setattr(stored_ids, "_UNSORTED", unsorted)
        ids = StoredIds(folder_of(root))
        # Each step is seen, or only the state after several.
        between = [("look", [])] if looks_always else []
        every = [("write", ["r0", "r1"]), ("prune", ["r0"]), *steps]
        for action, names in [part for step in every for part in (step, *between)] + [("look", [])]:
            if action.startswith("write"):
                written = ids.add if action == "write own" else (lambda shard, requests: None)
                with Writer(root, header(), written=written) as writer:
                    for name in names:
                        writer.add(entry(name))
            elif action == "merge":
                merge(root, root)
            elif action == "prune":
                stored = {one.request for one in open_store(root).requests}
                prune(root, requests=stored & {*names})
            else:
                stored = {one.request for one in open_store(root).requests}
                assert {name for name in IDS if ids.has(name)} == stored


def test_shards_of_the_writer_itself_are_not_read(tmp_path, monkeypatch):
    ids = StoredIds(folder_of(tmp_path))
    with Writer(tmp_path, header(), shard_bytes=1, written=ids.add) as writer:
        for name in IDS:  # each is a shard
            writer.add(entry(name))
    monkeypatch.setattr(stored_ids, "Shard", lambda *_: pytest.fail("a shard is read"))
    assert [ids.has(name) for name in (*IDS, "other")] == [True] * len(IDS) + [False]


def test_a_shard_that_is_merged_while_the_others_are_read_is_no_error(tmp_path, monkeypatch):
    for name in IDS[:3]:
        with Writer(tmp_path, header()) as writer:
            writer.add(entry(name))
    ids = StoredIds(folder_of(tmp_path))
    merged = []

    def read(folder, name):
        if not merged:
            merged.append(merge(tmp_path, tmp_path))
        return Shard(folder, name)

    monkeypatch.setattr(stored_ids, "Shard", read)
    assert [ids.has(name) for name in IDS] == [True] * 3 + [False] * 3


def test_a_damaged_shard_is_an_error_that_names_it(tmp_path):
    with Writer(tmp_path, header()) as writer:
        writer.add(entry("a"))
    (shard,) = tmp_path.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(StoreError, match=shard.name):
        StoredIds(folder_of(tmp_path)).has("b")
