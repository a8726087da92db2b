"""The lines that could not be captured, in a file of their own."""

from __future__ import annotations

import contextlib
import json
import os
from typing import IO

from midstream.capturing.records import Failed
from midstream.errors import SpecError


class Failures:
    """Writes `{"line": 17, "reason": "…"}` for each, as they come.

    Attributes:
        path: of the file; None: they are only counted.
        count: how many there were.
    """

    def __init__(self, path: str | None) -> None:
        """Nothing is written yet.

        Raises:
            SpecError: it could not be.
        """
        self.path = path
        self.count = 0
        self._file: IO[str] | None = None
        if path is not None:
            folder = os.path.dirname(os.path.abspath(path))
            if os.path.isdir(path) or not os.access(folder, os.W_OK | os.X_OK):
                raise SpecError("errors", f"cannot write a file {path}; name another")

    def begin(self) -> None:
        """Removes what an earlier job wrote there: each job tries again all that is missing."""
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def add(self, failed: Failed) -> None:
        """Takes note of a line. Raises OSError where that cannot be written."""
        self.count += 1
        if self.path is None:
            return
        if self._file is None:
            # By lines, so that they are there even if the job is killed.
            self._file = open(self.path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._file.write(json.dumps({"line": failed.line, "reason": failed.reason}) + "\n")

    def close(self) -> None:
        """No others follow."""
        if self._file is not None:
            self._file.close()
