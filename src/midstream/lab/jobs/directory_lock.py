"""Locks of a job's output directory, which only one job may use at a time.

Processes that write for it share a second lock, because they may outlive a job that was killed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from midstream.errors import StoreError
from midstream.lab.jobs.job import Job
from midstream.store import Store, open_store
from midstream.store.backends.base import ERRORS
from midstream.store.backends.local import LocalFolder, folder_of

LOCK = ".capture.lock"
WRITERS = ".capture.writers"
# Seconds that a job waits for the processes of a killed job, which notice its end and exit.
PATIENCE = 30.0
_POLL_SECONDS = 0.1
# Directories of this process's jobs. File locks belong to the process: taking one twice succeeds,
# and closing either file releases it.
_HELD: dict[tuple[int, int, int], object] = {}


@contextmanager
def taken(job: Job) -> Iterator[Store]:
    """Lock a job's output directory and return its store, created if missing."""
    folder = folder_of(job.out)
    folder.make()
    # Object stores have no locks.
    with _locked(folder.root) if isinstance(folder, LocalFolder) else nullcontext():
        if isinstance(folder, LocalFolder):
            _wait_for_writers(folder.root)
        if not job.resume:
            names = _contents(folder.root) if isinstance(folder, LocalFolder) else folder.names()
            if names:
                raise StoreError(
                    f"{job.out}: it is not empty, it contains {names[0]}; choose another "
                    "directory, or continue the job that was started there (--resume)"
                )
        yield open_store(job.out)


def errors_file(job: Job) -> str | None:
    """Return the path of the list of failed lines; None: there is none."""
    if job.errors:
        return job.errors
    folder = folder_of(job.out)
    return os.path.join(folder.root, ERRORS) if isinstance(folder, LocalFolder) else None


def mark(job: Job) -> str:
    """Write a random marker, by which others verify the directory; "" in an object store."""
    folder = folder_of(job.out)
    if not isinstance(folder, LocalFolder):
        return ""
    marker = secrets.token_hex(16)
    path = os.path.join(folder.root, WRITERS)
    try:
        with open(path, "wb") as file:
            file.write(marker.encode())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None
    return marker


def join_writers(job: Job, marker: str) -> None:
    """Take the shared lock of a job's writers until this process ends. To be called once."""
    folder = folder_of(job.out)
    if not isinstance(folder, LocalFolder):
        return
    path = os.path.join(folder.root, WRITERS)
    # Never closed, because that would release the lock.
    file = _opened(path)
    if file is None or os.pread(file, 1024, 0) != marker.encode():
        raise StoreError(
            f"{job.out}: on {os.uname().nodename} this path is not the job's directory; use a "
            "directory that all machines share, or s3://…"
        )
    if not _lock_within(file, fcntl.LOCK_SH):
        raise StoreError(f"{path}: another process has held its lock for {PATIENCE:g} seconds")


def _wait_for_writers(root: str) -> None:
    """Wait until no process of an earlier job writes into the directory."""
    file = _opened(os.path.join(root, WRITERS))
    if file is None:
        return
    try:
        if not _lock_within(file, fcntl.LOCK_EX):
            raise StoreError(
                f"{root}: processes of a job that has ended still write into it; end them first"
            )
    finally:
        os.close(file)


def _opened(path: str) -> int | None:
    """Return the descriptor of an opened file; None: it does not exist."""
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None


def _lock_within(file: int, how: int) -> bool:
    """Lock a file; return False if others have held its lock for `PATIENCE` seconds."""
    give_up = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.lockf(file, how | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > give_up:
                return False
        else:
            return True
        time.sleep(_POLL_SECONDS)


@contextmanager
def _locked(root: str) -> Iterator[None]:
    root_stat = os.stat(root)
    # Of the process: a forked one, which may outlive it, has no lock.
    key = os.getpid(), root_stat.st_dev, root_stat.st_ino
    mine = object()
    if _HELD.setdefault(key, mine) is not mine:
        raise _is_taken(root)
    try:
        lock = _lock(root)
        try:
            yield
        finally:
            os.close(lock)
    finally:
        del _HELD[key]


def _lock(root: str) -> int:
    path = os.path.join(root, LOCK)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from None
    try:
        # A lock of the process rather than of the open file: an engine process, forked from a job
        # that was killed, must not keep it.
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise _is_taken(root) from None
    return lock


def _is_taken(root: str) -> StoreError:
    return StoreError(f"{root}: another job is capturing into it")


def _contents(root: str) -> list[str]:
    """Return the names of the directory's files, without hidden ones, which any job leaves."""
    return sorted(name for name in os.listdir(root) if not name.startswith("."))
