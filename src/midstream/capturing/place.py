"""The directory that a job captures into: it is one job's at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from midstream.capturing.job import Job
from midstream.errors import StoreError
from midstream.store import Store, open_store
from midstream.store.folders import LocalFolder, folder_of

LOCK = ".capture.lock"
ERRORS = "errors.jsonl"


@contextmanager
def taken(job: Job) -> Iterator[Store]:
    """The store that a job captures into, made if it is missing.

    Raises:
        StoreError: it is not empty and the job does not resume, another job captures into it, or
            it cannot be written to.
    """
    folder = folder_of(job.out)
    folder.make()
    # In an object store nobody can be kept out.
    lock = _lock(folder.root) if isinstance(folder, LocalFolder) else None
    try:
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
