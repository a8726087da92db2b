"""File that lists the lines that could not be captured."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from midstream.errors import SpecError, StoreError
from midstream.lab.jobs.records import Failed

_START = re.compile(rb'\{"line": \d+, "reason": "')
_CUT = b'{"line": '


class Failures:
    """Writer of `{"line": 17, "reason": "…"}`, one for each failed line; no path: only counts."""

    def __init__(self, path: str | None) -> None:
        """Check that the file can be written, without writing it."""
        self.path = path
        self.count = 0
        self._file: IO[bytes] | None = None
        if path is not None:
            folder = os.path.dirname(os.path.abspath(path))
            if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
                raise SpecError("errors", f"cannot write the file {path}; choose another")
            if os.path.lexists(path) and not _is_list(path):
                # It would be removed, and might be the data or a device.
                raise SpecError(
                    "errors", f"{path} exists and is not a list of failed lines; choose another"
                )

    def begin(self) -> None:
        """Remove the list of an earlier run: each run retries all missing lines."""
        if self.path is not None:
            with _as_store_error(self.path), suppress(FileNotFoundError):
                os.unlink(self.path)

    def add(self, failed: Failed) -> None:
        self.count += 1
        if self.path is None:
            return
        with _as_store_error(self.path):
            if self._file is None:
                # Unbuffered, so that lines are in the file even if the job is killed.
                self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115
            line = json.dumps({"line": failed.line, "reason": failed.reason})
            self._file.write(line.encode() + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _is_list(path: str) -> bool:
    """Return whether a file was written by a job or is empty."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(path, "rb") as file:
            first = file.read(64)
    except OSError:
        return False
    # A killed job may have written only a part of the first line.
    is_cut = b"\n" not in first and len(first) < 32
    return bool(_START.match(first)) or (is_cut and _CUT.startswith(first[: len(_CUT)]))


@contextmanager
def _as_store_error(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
