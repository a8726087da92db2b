"""Records on disk, in the order of their numbers: each is a file until it is acknowledged."""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

from midstream.errors import StoreError
from midstream.sinks.daemon_threads import OrderedCalls
from midstream.store.backends.local import write_pieces

# Of a record: lengths of its header and of its rows in bytes, then both, then their CRC-32.
LENGTHS = struct.Struct(">IQ")
CRC = struct.Struct(">I")
MOST_HEADER = 64 << 20
MOST_ROWS = 1 << 40
_SUFFIX, _PART = ".rows", ".part"
_LOGGER = logging.getLogger(__name__)


class Spool:
    """The records of one folder, of at most `most_bytes`, or one above. Thread-safe.

    A record is there once its file has its name; numbers ascend, also after a restart.
    """

    def __init__(self, root: str, most_bytes: int) -> None:
        """Open the folder, with the records of earlier processes.

        Raises:
            StoreError: another process has it open.
        """
        os.makedirs(root, exist_ok=True)
        self._root, self._most = root, most_bytes
        self._lock_file = os.open(os.path.join(root, ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_file)
            raise StoreError(f"{root}: another process sends these rows") from None
        self._changed = threading.Condition()
        self._sizes: dict[int, int] = {}  # of the records that are not acknowledged, by number
        self._ready: dict[int, None] = {}  # of these, those that no reader has, in order
        self._held: dict[object, dict[int, int]] = {}  # and those that readers have: sizes
        self._written: list[int] = []  # parts that have no name yet
        self._closed = False
        self._checksums = OrderedCalls()
        self.nbytes = 0  # of the records that are not acknowledged
        for name in sorted(os.listdir(root)):
            if name.endswith(_PART):
                os.unlink(os.path.join(root, name))
            elif name.endswith(_SUFFIX):
                number = int(name.removesuffix(_SUFFIX))
                self._add(number, os.path.getsize(os.path.join(root, name)))
                self._ready[number] = None
        self._last = max(self._sizes, default=0)

    def write(self, header: Mapping[str, Any], rows: Iterable[Any], seconds: float) -> None:
        """Write a record, once there is room; others may read it after `publish`.

        Args:
            header: JSON values.
            rows: its bytes, in parts.
            seconds: how long to wait for room.

        Raises:
            TimeoutError: no reader made room.
            ValueError: the header is longer than readers take.
        """
        text = json.dumps(header).encode()
        if len(text) > MOST_HEADER:
            raise ValueError(
                f"positions and the rest of the header have {len(text):,} bytes, and readers take "
                f"{MOST_HEADER:,}; capture ranges of positions, or fewer sites and layers at once"
            )
        content = [memoryview(part).cast("B") for part in (text, *rows) if len(part)]
        length = sum(map(len, content)) - len(text)
        size = LENGTHS.size + len(text) + length + CRC.size
        if self._is_full(size):
            self.publish()  # a reader makes room by those
        with self._changed:
            if not self._changed.wait_for(lambda: not self._is_full(size), seconds):
                raise TimeoutError(
                    f"no reader acknowledged rows for {seconds:g} s, and the spool has "
                    f"{self.nbytes} bytes of {self._most}"
                )
            number = self._last = max(self._last + 1, time.time_ns())
            self._add(number, size)
        try:
            # Another thread computes the checksum meanwhile: it takes as long as the writing.
            crc = self._checksums.put(functools.partial(_crc_of, content))
            with open(self._path(number, _PART), "wb", buffering=0) as file:
                lengths = memoryview(LENGTHS.pack(len(text), length))
                write_pieces(file.fileno(), [lengths, *content])
                file.write(crc.result())
        except BaseException:
            self._discard(number)
            raise
        self._written.append(number)

    def publish(self) -> None:
        """Make written records durable, and let readers have them."""
        written, self._written = self._written, []
        try:
            for number in written:
                path = self._path(number, _PART)
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                os.rename(path, self._path(number))
            if written:
                self._sync()
        except BaseException:
            for number in written:
                self._discard(number)
            raise
        with self._changed:
            self._ready.update(dict.fromkeys(written))
            self._changed.notify_all()

    def begin(self, reader: object) -> None:
        """Let a reader take records, until it ends."""
        with self._changed:
            self._held[reader] = {}

    def take(self, reader: object, window: int, seconds: float) -> BinaryIO | None:
        """Return the file of the next record, for this reader alone; see `number_of`.

        Args:
            reader: whose records it is among until it acknowledges or ends.
            window: most bytes of its records, or one record.
            seconds: how long to wait for a record and for room; None is returned then.

        Raises:
            KeyError: the reader has ended, or the spool is closed.
        """

        def fits() -> bool:
            held, first = self._held.get(reader), next(iter(self._ready), None)
            if held is None or self._closed:
                return True
            size = 0 if first is None else self._sizes[first]
            return first is not None and (not held or sum(held.values()) + size <= window)

        with self._changed:
            if not self._changed.wait_for(fits, seconds):
                return None
            if self._closed:
                raise KeyError("the spool is closed")
            held = self._held[reader]
            number = next(iter(self._ready))
            del self._ready[number]
            held[number] = self._sizes[number]
        try:
            return open(self._path(number), "rb")
        except FileNotFoundError:
            _LOGGER.error("%s is gone: its rows are lost", self._path(number))
            with self._changed:
                held.pop(number, None)
            self._remove(number)
            return None

    def acknowledge(self, reader: object, number: int) -> None:
        """Delete a record that a reader has.

        Raises:
            KeyError: it has it not.
        """
        with self._changed:
            del self._held[reader][number]
        os.unlink(self._path(number))
        self._remove(number)

    def end(self, reader: object) -> list[int]:
        """Let other readers have the records that one has not acknowledged; return those."""
        with self._changed:
            held = self._held.pop(reader, {})
            self._ready = dict.fromkeys(sorted({*self._ready, *held}))
            self._changed.notify_all()
        return [*held]

    def wait_empty(self, seconds: float) -> bool:
        """Return whether all records are acknowledged within a time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._sizes, seconds)

    def close(self) -> None:
        """Let no reader have another record; those that are left stay on disk."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._checksums.close()
        os.close(self._lock_file)

    def _is_full(self, size: int) -> bool:
        return bool(self._sizes) and self.nbytes + size > self._most and not self._closed

    def _add(self, number: int, size: int) -> None:
        self._sizes[number] = size
        self.nbytes += size

    def _remove(self, number: int) -> None:
        with self._changed:
            self.nbytes -= self._sizes.pop(number)
            self._changed.notify_all()

    def _discard(self, number: int) -> None:
        for suffix in (_PART, _SUFFIX):
            with suppress(OSError):
                os.unlink(self._path(number, suffix))
        self._remove(number)

    def _path(self, number: int, suffix: str = _SUFFIX) -> str:
        return os.path.join(self._root, f"{number:020d}{suffix}")

    def _sync(self) -> None:
        folder = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _crc_of(parts: Iterable[Any]) -> bytes:
    """Return the CRC-32 of parts, one after the other."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return CRC.pack(crc)


def number_of(file: BinaryIO) -> int:
    """Return the number of the record that a file of `Spool.take` has."""
    return int(os.path.basename(file.name).removesuffix(_SUFFIX))
