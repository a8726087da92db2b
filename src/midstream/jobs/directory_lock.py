"""The directory that a job captures into: it is one job's at a time.

A job holds a lock of the directory. Where other processes write for it, on this machine or
elsewhere, each of them shares a second lock for as long as it lives. Of a job that was killed these
may outlive it by a moment, and what they wrote then the next job would not have seen: it waits for
that lock first.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

from midstream.errors import StoreError
from midstream.jobs.job import Job
from midstream.store import Store, open_store
from midstream.store.backends.local import LocalFolder, folder_of

LOCK = ".capture.lock"
WRITERS = ".capture.writers"
ERRORS = "errors.jsonl"
# For how long a job waits for what a killed one has left: these processes find out, and end.
PATIENCE = 30.0  # seconds
_BETWEEN_LOOKS = 0.1


@contextmanager
def taken(job: Job) -> Iterator[Store]:
    """The store that a job captures into, made if it is missing.

    Raises:
        StoreError: it is not empty and the job does not resume, another job captures into it or
            what one has left behind does, or it cannot be written to.
    """
    folder = folder_of(job.out)
    folder.make()
    # In an object store nobody can be kept out.
    lock = _lock(folder.root) if isinstance(folder, LocalFolder) else None
    try:
        if isinstance(folder, LocalFolder):
            _wait_for_writers(folder.root)
        if not job.resume:
            there = _contents(folder.root) if isinstance(folder, LocalFolder) else folder.names()
            if there:
                raise StoreError(
                    f"{job.out}: it is not empty, there is {there[0]}; name another directory, or "
                    "resume what was begun there (--resume)"
                )
        yield open_store(job.out)
    finally:
        if lock is not None:
            os.close(lock)


def errors_file(job: Job) -> str | None:
    """Where the lines are listed that could not be captured; None: nowhere."""
    if job.errors:
        return job.errors
    folder = folder_of(job.out)
    return os.path.join(folder.root, ERRORS) if isinstance(folder, LocalFolder) else None


def mark(job: Job) -> str:
    """Writes a word into the directory that a job has taken, by which its writers know it; empty in
    an object store, which is the same everywhere.

    Raises:
        StoreError: it cannot be written.
    """
    folder = folder_of(job.out)
    if not isinstance(folder, LocalFolder):
        return ""
    word = secrets.token_hex(16)
    path = os.path.join(folder.root, WRITERS)
    try:
        with open(path, "wb") as file:
            file.write(word.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None
    return word


def join_writers(job: Job, word: str) -> None:
    """Makes this process one of those that write for a job, until it ends. To be called once.

    Args:
        job: which; it runs.
        word: what `mark` gave where it runs.

    Raises:
        StoreError: this is not the directory that the job has taken, or it cannot be locked.
    """
    folder = folder_of(job.out)
    if not isinstance(folder, LocalFolder):
        return
    path = os.path.join(folder.root, WRITERS)
    try:
        # Never closed: that would end the lock.
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        there = b""
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None
    else:
        there = os.pread(file, 1024, 0)
    if there != word.encode():
        raise StoreError(
            f"{job.out}: on {os.uname().nodename} this is another directory than where the job "
            "runs; name one that all machines share, or s3://…"
        )
    try:
        fcntl.lockf(file, fcntl.LOCK_SH)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None


def _wait_for_writers(root: str) -> None:
    """Returns when nobody writes any more for a job that has ended."""
    path = os.path.join(root, WRITERS)
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None
    give_up = time.monotonic() + PATIENCE
    try:
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() > give_up:
                    raise StoreError(
                        f"{root}: processes of a job that has ended still write into it; end these "
                        "first"
                    ) from None
            time.sleep(_BETWEEN_LOOKS)
    finally:
        os.close(file)


def _lock(root: str) -> int:
    path = os.path.join(root, LOCK)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None
    try:
        # A lock of the process, not of the open file: an engine's process, forked from one that
        # was killed, must not hold it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise StoreError(f"{root}: another job is capturing into it") from None
    return lock


def _contents(root: str) -> list[str]:
    """What is there, but for hidden files: those that a job leaves that never wrote a shard."""
    return sorted(name for name in os.listdir(root) if not name.startswith("."))
