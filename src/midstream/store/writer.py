"""Writing a store: entries are gathered, and appear as whole shards."""

from __future__ import annotations

import os
import secrets
import threading
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from midstream.errors import StoreError
from midstream.store.backends.local import Folder, folder_of
from midstream.store.format.entry import Entry, Header
from midstream.store.format.shard_builder import ShardBuilder

SHARD_BYTES = 256 << 20


class Writer:
    """Puts entries into the store at a path. Any number of writers may share a store.

    An entry is acknowledged when `flush` or `close` has returned after it was added: then it is
    in the store, whole, whatever happens to the process or the machine. Until then it is nowhere
    but in memory; a crash leaves nothing of it that a reader would see.

    Where a shard cannot be written (the disk is full, the directory is gone), StoreError is
    raised, and what was added before is still held: `flush` tries again, with all of it. So a
    writer can go on once there is room, and gives up what it holds only when it is dropped.

    Threads may share a writer. A process that was forked may not: it would write its parent's
    entries a second time.
    """

    def __init__(
        self, root: str | os.PathLike[str], header: Header, shard_bytes: int = SHARD_BYTES
    ) -> None:
        """Args:
        root: the store's directory, made where there is none; or `s3://bucket/prefix`.
        header: what all rows share.
        shard_bytes: how long a shard gets; one that has a single entry may be longer.

        Raises:
            StoreError: there cannot be a store, or it cannot be written to.
        """
        if shard_bytes < 1:
            raise StoreError(f"shard_bytes: expected at least 1, got {shard_bytes}")
        self._folder: Folder = folder_of(root)
        self._folder.make()
        self._header = header
        self._shard_bytes = shard_bytes
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        self._begin()

    def add(self, entry: Entry) -> None:
        """Takes an entry. Its tensors are not copied: they must not change until it is
        acknowledged. Where it does not fit beside what is held, that is written first.

        Raises:
            StoreError: the entry is malformed, does not fit the header, or is a request and
                completion that is held already; or what is held could not be written. In either
                case the entry was not taken.
        """
        with self._lock:
            self._check()
            line, metadata, rows = self._draft.read(entry)
            size = sum(sum(data.nbytes for data in part.data.values()) for part in rows)
            if self._draft.full or self._draft.nbytes + size > self._shard_bytes:
                self._flush()
            self._draft.add(line, metadata, rows)

    def flush(self) -> Path | str | None:
        """Writes what is held as a shard.

        Returns:
            Where the shard is, in an object store its URL; None where nothing was held.

        Raises:
            StoreError: it could not be written. It is still held.
        """
        with self._lock:
            self._check()
            return self._flush()

    def close(self) -> None:
        """Flushes, and ends the writer. Raises as `flush` does, and then it is not closed."""
        with self._lock:
            if self._closed:
                return
            self._check()
            self._flush()
            self._closed = True

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self) -> None:
        self._draft = ShardBuilder(self._header)
        # A draft keeps its name: should a shard have appeared in spite of an error, the next try
        # takes its place.
        self._name = new_name()

    def _flush(self) -> Path | str | None:
        if not len(self._draft):
            return None
        self._folder.put(self._name, self._draft.pieces())
        written = f"{self._folder}/{self._name}"
        self._begin()
        return written if "://" in written else Path(written)

    def _check(self) -> None:
        if self._closed:
            raise StoreError(f"{self._folder}: this writer is closed")
        if self._process != os.getpid():
            raise StoreError(
                f"{self._folder}: this writer belongs to another process; make one in this"
            )


def new_name() -> str:
    """A name that no other shard has, here or elsewhere; later names sort after earlier ones."""
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%dT%H%M%S.%f}-{secrets.token_hex(8)}.safetensors"
