"""The interface that a store requires of where its shards are kept."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError

F = TypeVar("F", bound="Folder")

# What a capture job leaves in its folder besides shards: its list of failed lines.
ERRORS = "errors.jsonl"
_SHOWN = 5
_LEFT = re.compile(rf"\..*|.*\.(tmp|damaged)|{re.escape(ERRORS)}")
_SHARD = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}\.safetensors")


def is_shard_name(name: str) -> bool:
    """Whether a file name is that of a shard: `*.safetensors` of plain characters, not hidden."""
    return _SHARD.fullmatch(name) is not None


def check_store(folder: F) -> F:
    """Return a folder that is one of a store: with shards, or without anything that is none."""
    others = [] if folder.names() else folder.others()
    if others:
        shown = ", ".join(others[:_SHOWN]) + (", …" if len(others) > _SHOWN else "")
        raise StoreError(f"{folder}: no store: it has no shards (*.safetensors), but {shown}")
    return folder


def is_left(name: str) -> bool:
    """Whether a file name is of what writers, merges and jobs leave in a store besides shards."""
    return _LEFT.fullmatch(name) is not None


class File(Protocol):
    """The bytes of one shard. Immutable."""

    @property
    def size(self) -> int:
        """Length in bytes."""

    def read(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop) within the file, which may be mapped: not to be written to."""

    @property
    def address(self) -> int | None:
        """Where the bytes are in memory as long as this object exists; None: not mapped."""

    def gather(self, start: int, width: int, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Copy rows to uint8 [len(rows), width]: row i from start + rows[i] · width."""

    def will_need(self, start: int, stop: int) -> None:
        """Begin to read bytes [start, stop) into memory, if the file is mapped; do not wait."""


class Folder(Protocol):
    """The shards of one store. Every method may raise StoreError, which names the folder."""

    def names(self) -> list[str]:
        """Return the shards' names, ascending. Raises StoreError if the folder does not exist."""

    def others(self) -> list[str]:
        """Return the other names in the folder, ascending, without what writers leave there."""

    def open(self, name: str) -> File:
        """Return a shard, cached if it was opened before."""

    def make(self) -> None:
        """Create the folder if it is missing, and check that it is writable."""

    def put(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Write a shard atomically and durably, replacing any of the same name; all or nothing."""

    def delete(self, name: str) -> None:
        """Remove a shard if it exists."""
