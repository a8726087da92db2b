"""A store in an object store is the same store: against a server that speaks S3."""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.object_store import bucket, object_client, object_server, other_bucket, s3  # noqa: F401
from unit.store.making import TAPS, entry, header, same, write

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import Writer
from midstream.store.backends.cloud import _BLOCK, MARKER, CloudFolder, _Object

PART = 5 << 20  # the least that S3 takes
ENTRIES = [entry(f"r{i}", rows=3 + i, seed=10 * i, tag="even" * (1 - i % 2)) for i in range(6)]


@pytest.fixture
def root(bucket):  # noqa: F811
    return f"s3://{bucket}/runs/one"


def keys(client, bucket):  # noqa: F811
    return [each["Key"] for each in client.list_objects_v2(Bucket=bucket).get("Contents", [])]


def test_what_is_read_is_what_a_directory_would_have(root, tmp_path):
    write(root, ENTRIES, shard_bytes=2000)
    write(tmp_path, ENTRIES, shard_bytes=2000)
    here, there = open_store(tmp_path), open_store(root)
    assert there.root == root
    assert len(there.shards) == len(here.shards) > 1
    assert [each.request for each in there.requests] == [f"r{i}" for i in range(6)]
    for each in ENTRIES:
        for tap in TAPS:
            assert same(there.get(each.request)[tap], here.get(each.request)[tap])
    for chosen in ({}, {"layer": 0, "tag": "even"}, {"position": -1}):
        left, right = here.select(**chosen), there.select(**chosen)
        assert len(left) == len(right) > 0
        for one, other in zip(left.batches(7), right.batches(7), strict=True):
            assert same(one.values, other.values)
            assert one.request == other.request


def test_googles_and_azures_object_stores_are_stores(other_bucket, tmp_path):  # noqa: F811
    url = f"{other_bucket}/runs/one"
    for nowhere in (url, f"{other_bucket}-that-is-not/x"):
        with pytest.raises(StoreError, match=f"^{nowhere}: no such store"):
            open_store(nowhere)
    Writer(url, header()).close()
    store = open_store(url)
    assert (len(store), store.root) == (0, url)
    test_what_is_read_is_what_a_directory_would_have(url, tmp_path)
    store.refresh()
    assert len(store) == 6
    folder = CloudFolder(url)
    for shard in store.shards:
        folder.delete(shard.name)
        folder.delete(shard.name)
    store.refresh()
    assert len(store) == 0


def test_a_store_may_be_a_whole_bucket(bucket):  # noqa: F811
    write(f"s3://{bucket}", [entry("a")])
    write(f"s3://{bucket}/inner/", [entry("b")])
    assert [each.request for each in open_store(f"s3://{bucket}/").requests] == ["a"]
    assert [each.request for each in open_store(f"s3://{bucket}/inner").requests] == ["b"]


def test_writers_share_a_store_and_readers_see_more_after_refresh(root):
    first, second = Writer(root, header()), Writer(root, header())
    store = open_store(root)
    assert len(store) == 0
    first.add(entry("a"))
    second.add(entry("b"))
    written = [first.flush(), second.flush()]
    assert all(isinstance(one, str) and one.startswith(f"{root}/") for one in written)
    assert first.flush() is None
    assert len(store) == 0
    store.refresh()
    assert {each.request for each in store.requests} == {"a", "b"}
    assert {f"{root}/{shard.name}" for shard in store.shards} == set(written)


def test_a_forked_process_reads_and_writes(root):
    write(root, [entry("a")])
    store = open_store(root)
    expected = store.get("a")[TAPS[0]].float().sum().item()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if store.get("a")[TAPS[0]].float().sum().item() == expected:
                write(root, [entry("b")])
                code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    store.refresh()
    assert "b" in store


def test_an_upload_that_breaks_off_leaves_nothing(root, s3, bucket):  # noqa: F811
    folder = CloudFolder(root)

    def pieces():
        yield memoryview(b"half")
        raise OSError("out of breath")

    with pytest.raises(OSError, match="out of breath"):
        folder.put("a.safetensors", pieces())
    assert keys(s3, bucket) == []


def test_what_could_not_be_uploaded_is_still_held_and_written_by_the_next_flush(root, monkeypatch):
    writer = Writer(root, header())
    writer.add(entry("a"))
    client = writer._folder._connected()
    with monkeypatch.context() as broken:

        def refuse(*args, **kwargs):
            raise PermissionError("Access Denied")

        broken.setattr(client, "pipe_file", refuse)
        for _ in range(2):
            with pytest.raises(StoreError, match=rf"^{root}/\S+: PermissionError: Access Denied"):
                writer.flush()
    assert len(open_store(root)) == 0
    writer.close()
    assert "a" in open_store(root)


def test_a_shard_of_many_parts_appears_whole(root, monkeypatch):
    folder = CloudFolder(root)
    client = folder._connected()
    parts = []
    whole = client._call_s3

    async def counted(method, *args, **kwargs):
        parts.append(method)
        return await whole(method, *args, **kwargs)

    monkeypatch.setattr(client, "_call_s3", counted)
    monkeypatch.setattr(client, "pipe_file", partial(client.pipe_file, chunksize=PART))
    pieces = [bytes([number]) * (1 << 20) for number in range(12)]
    folder.put("a.safetensors", map(memoryview, pieces))
    assert parts.count("upload_part") == 3
    file = folder.open("a.safetensors")
    assert file.size == 12 << 20
    assert bytes(file.read(PART - 1, PART + 1)) == bytes([4, 5])


def test_a_part_that_cannot_be_uploaded_leaves_nothing(root, s3, bucket, monkeypatch):  # noqa: F811
    folder = CloudFolder(root)
    client = folder._connected()
    whole = client._call_s3

    async def broken(method, *args, **kwargs):
        if method == "upload_part" and kwargs["PartNumber"] == 3:
            raise OSError("connection reset")
        return await whole(method, *args, **kwargs)

    monkeypatch.setattr(client, "_call_s3", broken)
    monkeypatch.setattr(client, "pipe_file", partial(client.pipe_file, chunksize=PART))
    with pytest.raises(StoreError, match="a.safetensors: OSError: connection reset"):
        folder.put("a.safetensors", [memoryview(bytes(12 << 20))])
    assert keys(s3, bucket) == []
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)


@pytest.mark.parametrize(
    "url",
    [
        "gcs://bucket/x",
        "file:///tmp/x",
        "s3://",
        "s3:///x",
        "s3://Bucket/x",
        "s3://bucket//x",
        "s3://bucket/x?versionId=1",
        "s3://user:secret@bucket/x",
        Path("s3://bucket/x"),
        Path("gs://bucket/x"),
    ],
)
def test_other_urls_are_refused(url):
    for use in (open_store, lambda root: Writer(root, header())):
        with pytest.raises(StoreError, match="expected a path or a string s3://bucket/prefix"):
            use(url)


def test_a_url_where_nothing_is_is_no_store_and_one_that_was_made_is_empty(root, s3, bucket):  # noqa: F811
    for url in (root, "s3://there-is-no-such-bucket/x"):
        with pytest.raises(StoreError, match=f"^{url}: no such store"):
            open_store(url)
    Writer(root, header()).close()
    assert keys(s3, bucket) == [f"runs/one/{MARKER}"]
    assert len(open_store(root)) == 0
    with pytest.raises(StoreError, match="no-such-bucket/x: there is no such bucket"):
        Writer("s3://there-is-no-such-bucket/x", header())


@pytest.mark.parametrize(
    ("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs.core"), ("az", "adlfs")]
)
def test_the_extra_is_asked_for_where_it_is_missing(monkeypatch, scheme, package):
    monkeypatch.setenv("AWS_PROFILE", "somebody-new")  # so that no client is there yet
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(StoreError, match=r'pip install "midstream\[cloud\]"'):
        open_store(f"{scheme}://bucket/x")


def test_objects_that_are_no_shards_are_passed_over(root, s3, bucket):  # noqa: F811
    write(root, [entry("a")])
    for name in ("notes.txt", ".x.safetensors", "deeper/x.safetensors", "safetensors"):
        s3.put_object(Bucket=bucket, Key=f"runs/one/{name}", Body=b"?")
    s3.put_object(Bucket=bucket, Key="runs/one-and-more.safetensors", Body=b"?")
    assert [each.request for each in open_store(root).requests] == ["a"]


def test_an_object_that_was_damaged_is_named(root, s3, bucket):  # noqa: F811
    write(root, [entry("a", rows=40)])
    (name,) = (key for key in keys(s3, bucket) if key.endswith(".safetensors"))
    data = bytearray(s3.get_object(Bucket=bucket, Key=name)["Body"].read())
    store = open_store(root)
    place = store.shards[0].rows(0, TAPS[0], 0, 1).tobytes()
    data[bytes(data).index(place)] ^= 1
    s3.put_object(Bucket=bucket, Key=name, Body=bytes(data))
    with pytest.raises(StoreError, match=f"^s3://{bucket}/{name}: damaged"):
        open_store(root).get("a")[TAPS[0]]
    s3.put_object(Bucket=bucket, Key=name, Body=b"")
    with pytest.raises(StoreError, match=f"^s3://{bucket}/{name}: truncated: the object is empty"):
        len(open_store(root))


def test_an_object_that_is_gone_is_named(root, s3, bucket):  # noqa: F811
    write(root, [entry("a")])
    store = open_store(root)
    (shard,) = store.shards
    store._folder.delete(shard.name)
    store._folder.delete(shard.name)
    assert not any(key.endswith(".safetensors") for key in keys(s3, bucket))
    with pytest.raises(StoreError, match=f"{shard.name}: there is no such bucket or object"):
        store.get("a")[TAPS[0]]
    store.refresh()
    assert len(store) == 0


class Fetched(CloudFolder):
    """The bytes of one object without a server, and which of them were fetched."""

    def __init__(self, data):
        super().__init__("s3://bucket/x")
        self.data = data
        self.fetched = []

    def _fetch(self, name, start, stop):
        self.fetched.append((start, stop))
        return self.data[start:stop]


DATA = np.random.default_rng(0).bytes(3 * _BLOCK + 12345)


@given(st.data())
def test_any_range_reads_as_it_is(data):
    folder = Fetched(DATA)
    file = _Object(folder, "a", len(DATA))
    for _ in range(3):
        bounds = st.integers(0, len(DATA))
        start, stop = sorted((data.draw(bounds), data.draw(bounds)))
        assert bytes(file.read(start, stop)) == DATA[start:stop]
    assert len({start for start, _ in folder.fetched}) == len(folder.fetched), "fetched twice"


@given(
    start=st.integers(0, 5000),
    width=st.integers(1, 3000),
    picked=st.lists(st.integers(0, 10**6), max_size=12),
)
def test_any_rows_are_gathered_in_their_order(start, width, picked):
    file = _Object(Fetched(DATA), "a", len(DATA))
    count = (len(DATA) - start) // width
    rows = np.array(picked, np.int64) % count
    table = np.frombuffer(DATA, np.uint8, count * width, start).reshape(count, width)
    assert (file.gather(start, width, rows) == table[rows]).all()


def test_rows_that_lie_together_are_fetched_together_and_once_and_others_apart():
    folder = Fetched(DATA)
    file = _Object(folder, "a", len(DATA))
    rows = np.random.default_rng(1).permutation(3000)
    file.gather(64, 1024, rows)
    assert folder.fetched == [(0, 3 * _BLOCK)]
    file.gather(64, 1024, rows[:10])
    file.read(0, 100)
    assert len(folder.fetched) == 1
    file.read(len(DATA) - 1, len(DATA))
    assert folder.fetched[1:] == [(3 * _BLOCK, len(DATA))]
    folder = Fetched(DATA)
    _Object(folder, "a", len(DATA)).gather(0, 16, np.array([196_000, 0, 1]))
    assert folder.fetched == [(0, _BLOCK), (2 * _BLOCK, 3 * _BLOCK)]


def test_no_more_is_held_than_is_told(monkeypatch):
    monkeypatch.setattr("midstream.store.backends.cloud._MAX_CACHED", 2)
    folder = Fetched(DATA)
    file = _Object(folder, "a", len(DATA))
    assert bytes(file.read(0, len(DATA))) == DATA
    assert len(folder._cache) == 2
    assert sum(map(len, folder._cache.values())) <= 2 * _BLOCK


def test_an_answer_that_is_cut_short_is_refused(root, monkeypatch):
    write(root, [entry("a")])
    store = open_store(root)
    (shard,) = store.shards
    folder = CloudFolder(root)
    client = folder._connected()
    monkeypatch.setattr(client, "cat_file", lambda path, start, end: b"x" * (end - start - 1))
    with pytest.raises(StoreError, match=r"expected bytes 0 to \d+, got \d+ bytes"):
        folder.open(shard.name).read(0, 8)
