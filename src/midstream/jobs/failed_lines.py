"""The lines that could not be captured, in a file of their own."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from midstream.errors import SpecError, StoreError
from midstream.jobs.records import Failed

_START = re.compile(rb'\{"line": \d+, "reason": "')
_CUT = b'{"line": '


class Failures:
    """Writes `{"line": 17, "reason": "…"}` for each, as they come.

    Attributes:
        path: of the file; None: they are only counted.
        count: how many there were.
    """

    def __init__(self, path: str | None) -> None:
        """Nothing is written yet.

        Raises:
            SpecError: it could not be; or what is there is something else than such a list.
        """
        self.path = path
        self.count = 0
        self._file: IO[bytes] | None = None
        if path is not None:
            folder = os.path.dirname(os.path.abspath(path))
            if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
                raise SpecError("errors", f"cannot write a file {path}; name another")
            if os.path.lexists(path) and not _is_list(path):
                # It would be removed: it may be the data, or a device.
                raise SpecError(
                    "errors", f"{path} is there and is no list of lines that failed; name another"
                )

    def begin(self) -> None:
        """Removes what an earlier job wrote there: each job tries again all that is missing."""
        if self.path is not None:
            with _named(self.path), suppress(FileNotFoundError):
                os.unlink(self.path)

    def add(self, failed: Failed) -> None:
        """Takes note of a line. Raises StoreError where that cannot be written."""
        self.count += 1
        if self.path is None:
            return
        with _named(self.path):
            if self._file is None:
                # Not buffered, so that lines are there even if the job is killed.
                self._file = open(self.path, "wb", buffering=0)  # noqa: SIM115
            self._file.write(_line(failed))

    def close(self) -> None:
        """No others follow."""
        if self._file is not None:
            self._file.close()


def _line(failed: Failed) -> bytes:
    return json.dumps({"line": failed.line, "reason": failed.reason}).encode() + b"\n"


def _is_list(path: str) -> bool:
    """Whether a file is one that a job has written, or empty."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return False
        with open(path, "rb") as file:
            first = file.read(64)
    except OSError:
        return False
    # A job that was killed may have written no more than a part of a line.
    is_cut = b"\n" not in first and len(first) < 32
    return bool(_START.match(first)) or (is_cut and _CUT.startswith(first[: len(_CUT)]))


@contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}") from error
