"""Writer of a store: buffers entries and writes them as whole shards."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path

from midstream.errors import StoreError
from midstream.store.backends.base import Folder
from midstream.store.backends.local import folder_of
from midstream.store.format.entry import Entry, Header
from midstream.store.format.shard_builder import ShardBuilder
from midstream.validation import is_int, kind

SHARD_BYTES = 256 << 20


def check_shard_bytes(value: object) -> None:
    if not is_int(value):
        raise StoreError(f"shard_bytes: expected `int`, got {kind(value)}")
    if value < 1:
        raise StoreError(f"shard_bytes: expected at least 1, got {value}")


class Writer:
    """Writes entries to the store at a path. Any number of writers may share a store.

    An entry is durable once `flush` or `close` has returned after it was added; it then survives
    a crash of the process or the machine. Until then it exists only in memory, and a crash leaves
    nothing of it that readers would see.

    If a shard cannot be written (for example because the disk is full), StoreError is raised and
    all entries added before stay buffered. The next `flush` retries with all of them, so that the
    writer can continue once there is space. Only dropping the writer discards its entries.

    Threads may share a writer. A forked process may not use its parent's writer, because it would
    write the same entries a second time.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        header: Header,
        shard_bytes: int = SHARD_BYTES,
        written: Callable[[str, Iterable[str]], None] = lambda shard, requests: None,
    ) -> None:
        """Args:
        root: the store's directory, created if missing; or `s3://bucket/prefix`.
        header: what all rows share.
        shard_bytes: target length of a shard; a shard with a single entry may be longer.
        written: is called with the name and the request ids of each shard that was written.

        Raises:
            StoreError: the store cannot be created or is not writable.
        """
        check_shard_bytes(shard_bytes)
        self._folder: Folder = folder_of(root)
        self._folder.make()
        self._header = header
        self._shard_bytes = shard_bytes
        self._written = written
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._begin()

    def add(self, entry: Entry) -> None:
        """Buffer an entry; flush the buffered entries first if it does not fit beside them.

        Its tensors are not copied and must not change until the entry is durable.

        Raises:
            StoreError: the entry is malformed, does not match the header or is buffered already,
                or the buffered entries could not be written. The entry was not added.
        """
        with self._held():
            self._check()
            line, metadata, rows = self._draft.read(entry)
            size = sum(sum(data.nbytes for data in part.data.values()) for part in rows)
            if self._draft.full or self._draft.nbytes + size > self._shard_bytes:
                self._flush()
            self._draft.add(line, metadata, rows)

    def flush(self) -> Path | str | None:
        """Write the buffered entries as one shard.

        Returns:
            Path of the shard, in an object store its URL; None if nothing was buffered.

        Raises:
            StoreError: the shard could not be written. Its entries stay buffered.
        """
        with self._held():
            self._check()
            return self._flush()

    def close(self) -> None:
        """Flush and close the writer. If `flush` raises, the writer stays open."""
        if self._closed:
            return
        with self._held():
            if self._closed:
                return
            self._flush()
            self._closed = True

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self) -> None:
        self._draft = ShardBuilder(self._header)
        # The name stays the same for retries: if the shard appeared in spite of an error, the next
        # attempt replaces it.
        self._name = new_name()

    def _flush(self) -> Path | str | None:
        if not len(self._draft):
            return None
        self._folder.put(self._name, self._draft.pieces())
        self._written(self._name, self._draft.requests)
        written = f"{self._folder}/{self._name}"
        self._begin()
        return written if "://" in written else Path(written)

    def _held(self) -> threading.Lock:
        """Return the lock; in a forked process a thread that it lacks may hold it for good."""
        if self._process != os.getpid():
            raise StoreError(
                f"{self._folder}: the writer belongs to another process; create one in this process"
            )
        return self._lock

    def _check(self) -> None:
        if self._closed:
            raise StoreError(f"{self._folder}: the writer is closed")


def new_name() -> str:
    """Return a globally unique shard name; later names sort after earlier ones."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%dT%H%M%S.%f}-{secrets.token_hex(8)}.safetensors"
