"""Ids that callers give their rows: one request has each, whatever client, process or run it is."""

import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import Future

import pytest
from support.sinking import ORIGIN, delivery, put_now

from midstream.config.sinks import read_sinks
from midstream.errors import ExistsError, HttpError, SpecError
from midstream.plan import Capture, Plan
from midstream.sinks.name_claims import NameClaims
from midstream.sinks.sink_set import SinkSet
from midstream.store import open_store

HOLDING = """
import sys
from midstream.sinks.name_claims import NameClaims
print(NameClaims(sys.argv[1]).take(sys.argv[2]), flush=True)
sys.stdin.read()
"""
KINDS = ["store", "npz", "filesystem"]


def sinks_of(kind, root):
    return SinkSet(read_sinks({kind: {"root": str(root)}}), ORIGIN)


def plan(kind, request_id="a", tag="", layer=1):
    return Plan((Capture(layer, sink=kind, tag=tag, request_id=request_id),))


def taken(sinks, asked):
    names = sinks.names_of(asked)
    assert names is not None
    names.take()
    return names


def refused(sinks, asked):
    names = sinks.names_of(asked)
    assert names is not None
    with pytest.raises(ExistsError) as caught:
        names.take()
    assert caught.value.path == "capture[0].request_id"
    assert HttpError.of(caught.value).status == 409
    return caught.value.problem


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def sinks(kind, tmp_path):
    made = sinks_of(kind, tmp_path / "rows")
    yield made
    made.close()


def test_of_eight_requests_with_one_id_at_once_one_has_it(kind, sinks):
    start, has, lacks = threading.Barrier(8), [], []

    def ask():
        names = sinks.names_of(plan(kind))
        start.wait()
        try:
            names.take()
        except ExistsError as error:
            lacks.append(error)
        else:
            has.append(names)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(has), len(lacks)) == (1, 7)
    assert {error.path for error in lacks} == {"capture[0].request_id"}
    has[0].release()
    taken(sinks, plan(kind)).release()


def test_an_id_is_taken_until_its_rows_are_stored_and_then_the_sink_has_it(kind, sinks):
    queue = sinks.queue(kind)
    names = taken(sinks, plan(kind))
    assert "a running request" in refused(sinks, plan(kind))
    done = queue.put(delivery("a", tag=""), 60)
    names.release()
    # The rows are in the queue, where nobody sees them.
    problem = refused(sinks, plan(kind))
    assert "a running request" in problem or "already" in problem
    queue.drain()
    assert done.result(10).status == "ok"
    assert "already; use another id" in refused(sinks, plan(kind))
    taken(sinks, plan(kind, "b"))


def test_an_id_whose_rows_could_not_be_stored_can_be_used_again(kind, sinks, monkeypatch):
    names = taken(sinks, plan(kind))
    sink = sinks._sinks[kind]

    def fails(one):
        raise OSError("no space left")

    with monkeypatch.context() as broken:
        broken.setattr(sink, "write", fails)
        assert put_now(sinks.queue(kind), delivery("a"), 60).status == "error"
    names.release()
    taken(sinks, plan(kind))


def test_an_id_that_an_earlier_run_stored_is_refused(kind, tmp_path):
    before = sinks_of(kind, tmp_path / "rows")
    assert put_now(before.queue(kind), delivery("a"), 60).status == "ok"
    before.close()
    after = sinks_of(kind, tmp_path / "rows")
    refused(after, plan(kind))
    names = taken(after, plan(kind, "b"))
    # Another process of the server, or another server, writes it meanwhile.
    other = sinks_of(kind, tmp_path / "rows")
    assert "a running request" in refused(other, plan(kind, "b"))
    assert put_now(after.queue(kind), delivery("b"), 60).status == "ok"
    names.release()
    assert "already" in refused(other, plan(kind, "b"))
    for one in (after, other):
        one.close()


def test_a_store_finds_rows_by_their_id_alone_so_a_tag_makes_no_other_name(tmp_path):
    sinks = sinks_of("store", tmp_path)
    taken(sinks, plan("store", tag="x"))
    refused(sinks, plan("store", tag="y"))
    both = Plan(
        (
            Capture(1, sink="store", tag="x", request_id="b"),
            Capture(2, sink="store", tag="x", request_id="b"),
            Capture(1, sink="store", tag="y", request_id="b"),
        )
    )
    with pytest.raises(SpecError, match=r"capture\[2\].request_id: capture\[0\] has 'b' too"):
        sinks.names_of(both)
    sinks.close()
    files = sinks_of("npz", tmp_path / "files")
    taken(files, plan("npz", tag="x"))
    taken(files, plan("npz", tag="y"))
    files.close()


def test_every_acknowledged_row_is_found_by_the_id_that_its_client_gave(tmp_path):
    """What two clients with one id did: both were told "ok", and neither found its rows."""
    sinks = sinks_of("store", tmp_path)
    acknowledged = []
    for client in range(3):
        names = sinks.names_of(plan("store", f"r{client // 2}"))
        try:
            names.take()
        except ExistsError:
            continue
        result = put_now(sinks.queue("store"), delivery(f"r{client // 2}"), 60)
        names.release()
        assert result.status == "ok"
        acknowledged.append(result.manifest["request"])
    sinks.close()
    assert acknowledged == ["r0", "r1"]
    store = open_store(tmp_path)
    assert len(store) == 2
    for name in acknowledged:
        assert store.get(name).counts() == {("resid_post", 1): 2}


def test_a_release_during_take_gives_everything_back(kind, sinks):
    names = sinks.names_of(plan(kind))
    names.release()  # its client left while a thread reads what the sink stores
    names.take()
    taken(sinks, plan(kind))


def test_an_id_of_a_damaged_store_is_refused_as_unknown_and_rows_without_one_are_stored(tmp_path):
    sinks = sinks_of("store", tmp_path)
    assert put_now(sinks.queue("store"), delivery("a"), 60).status == "ok"
    sinks.close()
    (shard,) = tmp_path.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    sinks = sinks_of("store", tmp_path)
    names = sinks.names_of(plan("store", "b"))
    with pytest.raises(SpecError, match="cannot be compared .* omit it") as caught:
        names.take()
    assert not isinstance(caught.value, ExistsError)
    assert sinks.names_of(plan("store", "")) is None
    assert put_now(sinks.queue("store"), delivery("c"), 60).status == "ok"
    sinks.close()


@pytest.mark.engine  # starts processes
def test_another_process_has_an_id_until_it_ends_and_a_killed_one_leaves_nothing(tmp_path):
    path = str(tmp_path / "locks")
    command = [sys.executable, "-c", HOLDING, path, "a"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"True\n"
        mine = NameClaims(path)
        assert not mine.take("a")
        assert mine.take("b")
        other.kill()
        other.wait(60)
        assert mine.take("a")
    assert not NameClaims(path).take("a")
    mine.give("a")
    assert NameClaims(path).take("a")
    mine.close()


def test_names_are_counted_until_all_who_keep_them_are_done(tmp_path):
    names, done = NameClaims(str(tmp_path / "locks")), Future()
    names.keep_until(done, "a")  # nobody has taken it
    assert names.take("a")
    names.keep_until(done, "a")
    names.give("a")
    assert not names.take("a")
    done.set_result(None)
    assert names.take("a")
    names.close()
    assert not names._users.keys() - {"a"}


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path):
    os.symlink(tmp_path / "elsewhere", tmp_path / "locks")
    with pytest.raises(OSError, match="symbolic links"):
        NameClaims(str(tmp_path / "locks")).take("a")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("place", "error", "said"),
    [
        ("fcntl.fcntl", OSError(errno.ENOLCK, "No locks available"), "of this process only"),
        ("_open", PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
)
def test_locks_that_cannot_be_taken_are_told_and_the_process_keeps_its_own(
    tmp_path, monkeypatch, caplog, place, error, said
):
    def fails(*_):
        raise error

    monkeypatch.setattr(f"midstream.sinks.name_claims.{place}", fails)
    names = NameClaims(str(tmp_path / "locks"))
    assert names.take("a")
    assert not names.take("a")
    assert said in caplog.text


@pytest.mark.parametrize(("folder", "expected"), [(0o755, 0o600), (0o2775, 0o660), (0o1777, 0o600)])
def test_whoever_may_write_rows_may_lock_and_nobody_else(tmp_path, folder, expected):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows").chmod(folder)
    names = NameClaims(str(tmp_path / "rows" / "locks"))
    assert names.take("a")
    names.close()
    assert (tmp_path / "rows" / "locks").stat().st_mode & 0o777 == expected
