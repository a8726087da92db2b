"""Folders beneath a root, and never elsewhere, whatever links somebody has laid there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def folder_beneath(root: str, parts: Sequence[str], *, makes: bool) -> Iterator[int]:
    """A descriptor of the folder `root/part/part`.

    Args:
        root: itself it may be a link.
        parts: names, each one part of a path.
        makes: whether folders that are missing are made; durably, but for the root.

    Raises:
        OSError: one is missing, or is a link or no folder.
    """
    found = os.open(root, FOLDER)
    try:
        for part in parts:
            if makes:
                _make(part, found)
            inner = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=found)
            os.close(found)
            found = inner
        yield found
    finally:
        os.close(found)


def is_there(name: str, folder: int) -> bool:
    """Whether a folder has anything of this name, be it a link that leads nowhere."""
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
