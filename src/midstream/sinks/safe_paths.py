"""Folder access that never leaves a root folder, regardless of symbolic links in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def folder_beneath(root: str, parts: Sequence[str], *, makes: bool) -> Iterator[int]:
    """Open a folder below an existing root, made durably if `makes`; yield its descriptor."""
    folder = os.open(root, FOLDER)
    try:
        for part in parts:
            if makes:
                _make(part, folder)
            inner = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def is_there(name: str, folder: int) -> bool:
    """Whether a folder has an entry of this name, including dangling links."""
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True


def _make(name: str, folder: int) -> None:
    try:
        os.mkdir(name, dir_fd=folder)
    except FileExistsError:
        return
    os.fsync(folder)
