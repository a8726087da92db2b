"""Entries become whole shards, or StoreErrors after which nothing is lost."""

import errno
import multiprocessing
import os
import stat
import threading

import pytest
import torch
from unit.store.making import HIDDEN, TAPS, entry, header, ids, rows_of, same, vectors, write

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import Entry, TapRows, Writer, verify


def files(root):
    return sorted(path.name for path in root.iterdir())


def test_nothing_is_there_before_flush_and_one_shard_after(tmp_path):
    writer = Writer(tmp_path / "deep" / "store", header())
    writer.add(entry("a"))
    writer.add(entry("b"))
    assert files(tmp_path / "deep" / "store") == []
    written = writer.flush()
    assert files(tmp_path / "deep" / "store") == [written.name]
    assert written.parent == tmp_path / "deep" / "store"
    assert ids(written.parent) == [("a", 0), ("b", 0)]


def test_shards_are_no_longer_than_asked_but_for_a_single_entry(tmp_path):
    small, large = [entry(f"s{i}", rows=8) for i in range(20)], entry("large", rows=400)
    write(tmp_path, [*small, large, entry("last")], shard_bytes=4000)
    store = open_store(tmp_path)
    assert len(store.requests) == 22
    sizes = {each.shard: 0 for each in store.requests}
    for each in store.requests:
        sizes[each.shard] += 1
    for name, entries in sizes.items():
        size = (tmp_path / name).stat().st_size
        assert entries == 1 or size < 4000 + 2000, "a header comes on top"
    assert max(sizes.values()) > 1
    assert [each.request for each in store.requests][-2:] == ["large", "last"]


def test_rows_are_not_copied_before_they_are_written(tmp_path):
    held = entry("a")
    writer = Writer(tmp_path, header())
    writer.add(held)
    held.taps[TAPS[0]].data.fill_(7)
    writer.flush()
    assert open_store(tmp_path).get("a").encoded(*TAPS[0]).unique().tolist() == [7]


def test_rows_that_do_not_lie_together_are_written_in_order(tmp_path):
    block = torch.arange(5 * 3 * HIDDEN, dtype=torch.float32).bfloat16().view(5, 3, HIDDEN)
    positions = torch.arange(5)
    taps = {
        ("resid_post", i): TapRows(block.view(torch.uint8)[:, i], positions, positions)
        for i in range(3)
    }
    write(tmp_path, [Entry(request="a", prompt_tokens=5, taps=taps)])
    for i in range(3):
        assert same(open_store(tmp_path).get("a")["resid_post", i], block[:, i])


def test_taps_with_indices_of_their_own_are_groups_of_their_own(tmp_path):
    head = header()
    taps = {
        ("resid_post", 0): rows_of(vectors(0, 2, head), head, [0, 1]),
        ("resid_post", 1): rows_of(vectors(1, 1, head), head, [4]),
        ("resid_pre", 0): rows_of(vectors(2, 2, head), head, [0, 1]),
        ("resid_pre", 1): rows_of(vectors(3, 0, head), head, []),
    }
    write(tmp_path, [Entry(request="a", prompt_tokens=5, taps=taps), entry("b")])
    found = open_store(tmp_path).get("a")
    assert [len(group.taps) for group in open_store(tmp_path).shards[0].groups] == [2, 1, 1, 3]
    for i, tap in enumerate(taps):
        assert same(found[tap], vectors(i, len(taps[tap].positions), head))
        assert found.positions_of(*tap).equal(taps[tap].positions)
        assert found.token_ids_of(*tap).equal(taps[tap].token_ids)


def test_an_entry_without_taps_or_rows_is_kept(tmp_path):
    write(tmp_path, [Entry(request="a", prompt_tokens=0, taps={}), entry("b", rows=0)])
    store = open_store(tmp_path)
    assert len(store.get("a")) == 0
    assert store.get("b")[TAPS[0]].shape == (0, HIDDEN)
    assert len(store.select()) == 0
    assert verify(tmp_path).ok


def test_metadata_tags_and_children_come_back(tmp_path):
    metadata = {"prompt": "Ünï\n\u2028 🦊", "plan": {"edits": [1.5, None, True]}, "": []}
    write(tmp_path, [entry("a", child=2, tag="x", prompt_tokens=7, metadata=metadata), entry("b")])
    first, second = open_store(tmp_path).requests
    assert (first.request, first.child, first.tag, first.prompt_tokens) == ("a", 2, "x", 7)
    assert first.metadata == metadata
    assert (second.request, second.child, second.tag, second.metadata) == ("b", 0, "", {})
    assert first.taps == TAPS


def test_many_groups_make_a_shard_full(tmp_path, monkeypatch):
    monkeypatch.setattr("midstream.store.format.shard_builder._MANY_TENSORS", 20)
    taps = [("resid_post", layer) for layer in range(10)]
    write(tmp_path, [entry(str(i), taps=taps[i : i + 1]) for i in range(10)])
    assert [len(shard.lines) for shard in open_store(tmp_path).shards] == [5, 5]


GOOD = entry("a").taps[TAPS[0]]
WRONG = [
    ({"request": ""}, "request: expected 1 to 1024 characters, got 0"),
    ({"request": 7}, "request: expected `str`, got `int`"),
    ({"request": "\ud800"}, "contains a lone surrogate"),
    ({"child": -1}, "'a': child: expected 0 to 2147483647, got -1"),
    ({"tag": None}, "tag: expected `str`, got `None`"),
    ({"prompt_tokens": -1}, "prompt_tokens: expected 0 to"),
    ({"metadata": [1]}, "metadata: expected a dict, got `list`"),
    ({"metadata": {"x": float("nan")}}, "metadata: Out of range float values"),
    (
        {"metadata": {1: 0, "1": 0}},
        "(?<!metadata: )metadata: (?!metadata).*duplicate JSON field '1'",
    ),
    ({"metadata": {"x": "\ud800"}}, "metadata: .*surrogates not allowed"),
    (
        {"metadata": {"x": "y" * (17 << 20)}},
        "(?<!metadata: )metadata of 17825801 bytes; the limit is",
    ),
    ({"taps": {"resid_post": GOOD}}, r"expected \(site, layer\) as keys, got \"'resid_post'\""),
    ({"taps": {("resid_pots", 1): GOOD}}, "unknown site 'resid_pots'.*did you mean `resid_post`"),
    ({"taps": {("resid_post", 1): "rows"}}, r"taps\['resid_post', 1\]: expected `TapRows`"),
    ({"taps": {("resid_post", 1): GOOD, ("post_block", 1): GOOD}}, "given twice, by two names"),
]


@pytest.mark.parametrize(("fields", "problem"), WRONG, ids=[str(one)[:40] for one, _ in WRONG])
def test_a_malformed_entry_is_refused_by_name_and_not_taken(tmp_path, fields, problem):
    good = {"request": "a", "prompt_tokens": 2, "taps": {TAPS[0]: GOOD}}
    writer = Writer(tmp_path, header())
    with pytest.raises(StoreError, match=problem):
        writer.add(Entry(**(good | fields)))
    assert writer.flush() is None


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("data", GOOD.data[:2], r"data: expected shape \[3, 16\], got \[2, 16\]"),
        ("data", GOOD.data.view(torch.int16), "data: expected torch.uint8, got torch.int16"),
        ("data", GOOD.data.numpy(), "data: expected a tensor, got `ndarray`"),
        ("data", GOOD.data.to("meta"), "data: expected a tensor on the host, got one on meta"),
        ("positions", torch.arange(3.0), "positions: expected torch.int64, got torch.float32"),
        ("positions", torch.tensor([0, 2, 1]), "expected ascending positions"),
        ("positions", torch.tensor([-1, 0, 1]), "expected ascending positions from 0"),
        ("positions", torch.tensor([0, 1, 1 << 26]), "from 0 to 67108863"),
        ("token_ids", torch.arange(2), r"token_ids: expected shape \[3\], got \[2\]"),
    ],
)
def test_malformed_rows_are_refused_by_the_name_of_their_tap(tmp_path, field, value, problem):
    fields = {"data": GOOD.data, "positions": GOOD.positions, "token_ids": GOOD.token_ids}
    wrong = Entry(
        request="a", prompt_tokens=2, taps={TAPS[0]: TapRows(**(fields | {field: value}))}
    )
    writer = Writer(tmp_path, header())
    with pytest.raises(StoreError, match=problem) as caught:
        writer.add(wrong)
    assert "request 'a': taps['resid_pre', 0]." in str(caught.value)
    assert writer.flush() is None


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"model": None}, "model: expected `str`, got `None`"),
        ({"dtype": "float64"}, "dtype: expected one of .*, got 'float64'"),
        ({"codec": "raw9"}, "codec: expected one of"),
        ({"codec": "rp8"}, "codec: expected the full spec 'rp8:k=512,seed=0', got 'rp8'"),
        ({"codec": "topk8:k=64"}, "codec.k: expected at most 8"),
    ],
)
def test_a_malformed_header_is_refused_by_name(fields, problem):
    with pytest.raises(StoreError, match=problem):
        header(**fields)


def test_a_completion_is_added_to_a_shard_once(tmp_path):
    with Writer(tmp_path, header()) as writer:
        writer.add(entry("a"))
        writer.add(entry("a", child=1))
        with pytest.raises(StoreError, match="request 'a': completion 0 was added before"):
            writer.add(entry("a", rows=7))
    assert ids(tmp_path) == [("a", 0), ("a", 1)]


def test_what_is_no_entry_path_or_directory_is_refused(tmp_path, monkeypatch):
    with pytest.raises(StoreError, match="expected `Entry`, got `dict`"):
        Writer(tmp_path, header()).add({})
    with pytest.raises(StoreError, match="expected a path or URL, got `int`"):
        Writer(7, header())
    with pytest.raises(StoreError, match="shard_bytes: expected at least 1, got 0"):
        Writer(tmp_path, header(), shard_bytes=0)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="file: expected a directory"):
        Writer(tmp_path / "file", header())
    with pytest.raises(StoreError, match="file: Not a directory"):
        open_store(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(StoreError, match="the directory is not writable"):
        Writer(tmp_path, header())


def test_a_closed_writer_takes_nothing(tmp_path):
    writer = Writer(tmp_path, header())
    writer.add(entry("a"))
    writer.close()
    writer.close()
    for call in (lambda: writer.add(entry("b")), writer.flush):
        with pytest.raises(StoreError, match="the writer is closed"):
            call()
    assert ids(tmp_path) == [("a", 0)]


def failing(name, number, after=0):
    """A patch of an os function that fails from call `after` on."""
    real, calls = getattr(os, name), []

    def wrapper(*args, **kwargs):
        calls.append(args)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(
    ("function", "number", "after"),
    [
        ("open", errno.EACCES, 0),
        ("writev", errno.ENOSPC, 0),
        ("fsync", errno.EIO, 0),
        ("rename", errno.EIO, 0),
        ("fsync", errno.EIO, 1),  # the directory's, when the shard is there already
    ],
)
def test_a_shard_that_cannot_be_written_is_held_and_written_later(
    tmp_path, monkeypatch, function, number, after
):
    writer = Writer(tmp_path, header())
    writer.add(entry("a"))
    with monkeypatch.context() as patched:
        patched.setattr(os, function, failing(function, number, after))
        with pytest.raises(StoreError, match=os.strerror(number)) as caught:
            writer.flush()
    assert str(tmp_path) in str(caught.value)
    assert not [name for name in files(tmp_path) if name.startswith(".")]
    writer.add(entry("b"))
    writer.flush()
    assert ids(tmp_path) == [("a", 0), ("b", 0)], "each of them once"
    assert verify(tmp_path).ok


def test_a_full_disk_stops_add_before_it_takes_more(tmp_path, monkeypatch):
    writer = Writer(tmp_path, header(), shard_bytes=1000)
    writer.add(entry("a", rows=20))
    with monkeypatch.context() as patched:
        patched.setattr(os, "writev", failing("writev", errno.ENOSPC))
        for _ in range(3):
            with pytest.raises(StoreError, match="No space left on device"):
                writer.add(entry("b", rows=20))
    writer.add(entry("b", rows=20))
    writer.close()
    assert ids(tmp_path) == [("a", 0), ("b", 0)]


def test_a_file_system_without_fsync_for_directories_will_do(tmp_path, monkeypatch):
    real = os.fsync

    def fsync(file):
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path, [entry("a")])
    assert ids(tmp_path) == [("a", 0)]


def test_an_interrupted_flush_leaves_nothing_and_can_be_repeated(tmp_path, monkeypatch):
    writer = Writer(tmp_path, header())
    writer.add(entry("a"))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
    assert files(tmp_path) == []
    writer.close()
    assert ids(tmp_path) == [("a", 0)]


def test_a_system_that_writes_a_few_bytes_at_a_time_gets_all_of_them(tmp_path, monkeypatch):
    real = os.writev

    def writev(file, pieces):
        first = next((piece for piece in pieces if len(piece)), pieces[0])
        return real(file, [first[:7]])

    monkeypatch.setattr(os, "writev", writev)
    write(tmp_path, [entry("a")])
    assert verify(tmp_path).ok
    assert same(open_store(tmp_path).get("a")[TAPS[2]], vectors(2, 3, header()))


def test_what_was_added_is_written_when_the_block_ends_with_an_error(tmp_path):
    writer = Writer(tmp_path, header())
    writer.add(entry("a"))
    with pytest.raises(ZeroDivisionError), writer:
        _ = 1 / 0
    assert ids(tmp_path) == [("a", 0)]


def test_threads_share_a_writer(tmp_path):
    with Writer(tmp_path, header(), shard_bytes=3000) as writer:

        def work(number):
            for i in range(25):
                writer.add(entry(f"{number}-{i}"))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ids(tmp_path) == sorted((f"{n}-{i}", 0) for n in range(4) for i in range(25))
    assert verify(tmp_path).ok


def write_some(root, number):
    write(
        root, [entry(f"{number}-{i}", seed=100 * number + i) for i in range(30)], shard_bytes=3000
    )


@pytest.mark.engine  # starts processes
@pytest.mark.parametrize("writers", [2, 4])
def test_processes_share_a_store(tmp_path, writers):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=write_some, args=(tmp_path, n)) for n in range(writers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    store = open_store(tmp_path)
    assert ids(tmp_path) == sorted((f"{n}-{i}", 0) for n in range(writers) for i in range(30))
    assert same(store.get("1-29")[TAPS[0]], vectors(129, 3, header()))
    assert verify(tmp_path).ok


def test_taps_that_are_made_as_they_are_read_have_each_its_own_index(tmp_path):
    """Their tensors are gone, and others may lie where they lay."""
    head = header()
    data = rows_of(vectors(0, 2, head), head).data

    class Made(dict):
        def items(self):
            for layer in range(50):
                tokens = torch.arange(2)
                rows = TapRows(data, torch.arange(layer, layer + 2), tokens)
                del tokens
                yield ("resid_post", layer), rows
                del rows

        def __len__(self):
            return 50

    with Writer(tmp_path, head) as writer:
        writer.add(Entry(request="a", prompt_tokens=99, taps=Made()))
    found = open_store(tmp_path).get("a")
    for layer in range(50):
        assert found.positions_of("resid_post", layer).tolist() == [layer, layer + 1]
