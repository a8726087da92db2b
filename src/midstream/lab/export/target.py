"""Targets of exports: a file or folder that is there only once it is complete."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from midstream.errors import StoreError


@contextmanager
def unfinished(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a path beside `path`, of a file or folder to write: renamed if nothing is raised.

    Raises:
        StoreError: there is a file or folder already, or it cannot be written.
    """
    target = Path(path)
    if os.path.lexists(target):
        raise StoreError(f"{target} exists already")
    part = target.parent / f".{target.name}.{uuid.uuid4().hex}.part"
    try:
        yield part
        part.rename(target)
    except OSError as error:
        # The message names the target, not the temporary file.
        problem = os.strerror(error.errno) if error.errno else error
        raise StoreError(f"{target}: {problem}") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
