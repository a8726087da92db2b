"""Where a job captures into, other than an empty directory."""

import multiprocessing
import subprocess
import sys
import threading

import pytest
from lab.jobs.checking import check_rows
from lab.jobs.fakes import FakeEngine, job, prompts, write_lines
from support.object_store import bucket, object_client, object_server, s3  # noqa: F401

from midstream.errors import StoreError
from midstream.lab.jobs import CaptureRun, capture_dataset
from midstream.lab.jobs import directory_lock as place
from midstream.lab.jobs.directory_lock import join_writers


def test_a_job_into_an_object_store_is_resumed_as_any(tmp_path, bucket):  # noqa: F811
    out = f"s3://{bucket}/acts"
    write_lines(tmp_path, [*prompts(6), b"?"])
    first = capture_dataset(job(tmp_path, out=out, limit=4), FakeEngine)
    assert (first.status, first.counts.stored) == (0, 4)
    with pytest.raises(StoreError, match="it is not empty"):
        capture_dataset(job(tmp_path, out=out), FakeEngine)
    listed = tmp_path / "failures.jsonl"
    second = capture_dataset(job(tmp_path, out=out, resume=True, errors=str(listed)), FakeEngine)
    assert (second.counts.skipped, second.counts.stored, second.counts.failed) == (4, 2, 1)
    assert second.errors == str(listed)
    check_rows(out, {n + 1: each["text"] for n, each in enumerate(prompts(6))})
    # There is no place there for a list that grows.
    third = capture_dataset(job(tmp_path, out=out, resume=True), FakeEngine)
    assert (third.counts.failed, third.errors) == (1, None)


def test_a_file_is_no_directory(tmp_path):
    write_lines(tmp_path, prompts(2))
    (tmp_path / "acts").write_text("a file")
    with pytest.raises(StoreError, match="acts: expected a directory"):
        capture_dataset(job(tmp_path), FakeEngine)


def test_what_was_merged_or_pruned_since_is_resumed_as_it_is_now(tmp_path):
    from midstream.store import merge, open_store, prune

    write_lines(tmp_path, prompts(30))
    capture_dataset(job(tmp_path, flush_seconds=0.0, limit=20), FakeEngine)
    merge(tmp_path / "acts", tmp_path / "acts")
    gone = open_store(tmp_path / "acts").requests[3].request
    prune(tmp_path / "acts", requests=[gone])
    again = capture_dataset(job(tmp_path, resume=True), FakeEngine)
    assert (again.counts.skipped, again.counts.stored) == (19, 11)
    check_rows(tmp_path / "acts", {n + 1: each["text"] for n, each in enumerate(prompts(30))})


_CONTEXT = multiprocessing.get_context("fork")


def _write_on(asked, word, joined, end):
    join_writers(asked, word)
    joined.set()
    end.wait(30)


@pytest.fixture
def left(tmp_path):
    """A job, a process of one that has ended and writes on, and the event that ends it."""
    write_lines(tmp_path, prompts(3))
    asked = job(tmp_path, resume=True)
    with place.taken(asked):
        word = place.mark(asked)
    joined, end = _CONTEXT.Event(), _CONTEXT.Event()
    writer = _CONTEXT.Process(target=_write_on, args=(asked, word, joined, end))
    writer.start()
    assert joined.wait(30)
    yield asked, writer, end
    end.set()
    writer.join()


def test_a_job_waits_for_what_a_killed_one_has_left_and_reads_the_store_then(left):
    asked, writer, end = left
    threading.Timer(0.5, end.set).start()
    with place.taken(asked):
        writer.join(0)
        assert end.is_set(), "it did not wait"


def test_a_job_is_refused_while_others_write_on(left, monkeypatch):
    monkeypatch.setattr(place, "PATIENCE", 0.2)
    asked, writer, end = left
    with pytest.raises(StoreError, match="processes of a job that has ended still write"):
        capture_dataset(asked, FakeEngine)
    end.set()
    writer.join()
    assert capture_dataset(asked, FakeEngine).counts.stored == 3


@pytest.mark.parametrize("there", [None, b"", b"0" * 32])
def test_a_writer_that_sees_another_directory_is_refused(tmp_path, there):
    asked = job(tmp_path, resume=True)
    with place.taken(asked):
        word = place.mark(asked)
        path = tmp_path / "acts" / place.WRITERS
        path.unlink()
        if there is not None:
            path.write_bytes(there)
        with pytest.raises(StoreError, match="this path is not the job's directory"):
            join_writers(asked, word)


def test_one_job_at_a_time_of_one_process_captures_into_a_directory(tmp_path):
    """The kernel would give a process the lock again, and drop it with the first that ends."""
    write_lines(tmp_path, prompts(3))
    with CaptureRun(job(tmp_path)):
        for _ in range(2):
            with pytest.raises(StoreError, match="another job is capturing into it"):
                CaptureRun(job(tmp_path, resume=True))
        lock = (
            "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        )
        path = str(tmp_path / "acts" / ".capture.lock")
        other = subprocess.run(
            [sys.executable, "-c", lock, path], stderr=subprocess.PIPE, check=False
        )
        assert b"BlockingIOError" in other.stderr, "the lock is gone"
    with CaptureRun(job(tmp_path, resume=True)):
        pass
