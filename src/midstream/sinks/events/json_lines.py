"""Files of JSON lines, to which several processes append, and the sink `jsonl`."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Literal

from midstream.config.event_sinks import JsonLinesSettings
from midstream.sinks.events.base import DELIVERED, EventSink, SendResult, SinkEvent

# Only the server's user reads what may have texts of clients.
_MODE = 0o600
_LOOK_SECONDS = 0.02  # interval of attempts to lock


class JsonLinesFile:
    """A file of lines, rotated by size. A write is all there or, if it raises, not at all."""

    def __init__(
        self,
        path: str,
        rotate_bytes: int = 64 << 20,
        keep: int = 5,
        fsync: Literal["batch", "never"] = "batch",
    ) -> None:
        """Open the file, or create it.

        Raises:
            OSError: it cannot be opened or locked, or is no regular file.
        """
        self._path = path
        self._rotate_bytes = rotate_bytes
        self._keep = keep
        self._is_synced = fsync == "batch"
        self._file = -1
        self._lock = self._opened(f"{path}.lock")
        try:
            self._file = self._opened(path)
        except BaseException:
            os.close(self._lock)
            raise

    def append(self, lines: Sequence[bytes], seconds: float = 10.0) -> None:
        """Append lines, without their line breaks.

        Raises:
            OSError: nothing was appended.
            TimeoutError: another process has locked the file for `seconds`.
        """
        data = b"".join(line + b"\n" for line in lines)
        with self._locked(seconds):
            size = self._current_size()
            if size and size + len(data) > self._rotate_bytes:
                self._rotate()
                size = 0
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                data = b"\n" + data  # a process was killed within a line
            try:
                self._write(data)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(self._file, size)
                raise

    def close(self) -> None:
        for file in (self._file, self._lock):
            os.close(file)

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        if self._is_synced:
            os.fsync(self._file)

    def _current_size(self) -> int:
        """Return the file's size; another process may have rotated it meanwhile."""
        opened = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (opened.st_dev, opened.st_ino):
            self._reopen()
            opened = os.fstat(self._file)
        return opened.st_size

    def _rotate(self) -> None:
        for number in range(self._keep, 1, -1):
            with suppress(FileNotFoundError):
                os.replace(f"{self._path}.{number - 1}", f"{self._path}.{number}")
        os.replace(self._path, f"{self._path}.1")
        self._reopen()

    def _reopen(self) -> None:
        file = self._opened(self._path)
        os.close(self._file)
        self._file = file

    @staticmethod
    def _opened(path: str) -> int:
        # Without waiting for a reader, should it be a pipe.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(path, flags, _MODE)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(f"{path}: not a regular file")
        return file

    @contextmanager
    def _locked(self, seconds: float) -> Iterator[None]:
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise TimeoutError(f"{self._path}: locked for {seconds:g} s") from None
                time.sleep(_LOOK_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


class JsonLinesSink(EventSink):
    """Appends events to a file."""

    def __init__(self, settings: JsonLinesSettings) -> None:
        """Open the file. Raises OSError."""
        self._file = JsonLinesFile(
            settings.path, settings.rotate_bytes, settings.keep, settings.fsync
        )

    def send(self, batch: Sequence[SinkEvent], seconds: float) -> SendResult:
        self._file.append([event.data for event in batch], seconds)
        return DELIVERED

    def close(self) -> None:
        self._file.close()
