"""Memory that processes of one machine share: it has no name, so nothing of it can be left behind.

The kernel frees it when the last process that maps it has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_MADV_HUGEPAGE = 14  # mmap has no name for it everywhere


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory that this process made.

    Attributes:
        fd: what others of this machine map it by; see `map_shared`.
        tensor: uint8, all of it.
    """

    fd: int
    tensor: Tensor

    @staticmethod
    def create(nbytes: int) -> SharedMemory:
        """Zeroed memory; its pages are taken when they are first written."""
        fd = os.memfd_create("midstream", os.MFD_CLOEXEC)
        return _sized(fd, nbytes)

    @staticmethod
    def on_disk(nbytes: int, folder: Path) -> SharedMemory:
        """Memory that the kernel keeps in a file without a name, when it needs the room.

        Raises:
            OSError: the folder cannot be written, or is full.
        """
        fd, path = tempfile.mkstemp(prefix="midstream-spill-", dir=folder)
        os.unlink(path)
        try:
            # What is only promised would end the process when the disk turns out to be full.
            os.posix_fallocate(fd, 0, nbytes)
        except OSError:
            os.close(fd)
            raise
        return _sized(fd, nbytes)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.tensor.numel()

    def close(self) -> None:
        """Nobody can map it any more; it is there until whoever maps it lets go."""
        os.close(self.fd)


def map_shared(pid: int, fd: int, nbytes: int) -> Tensor:
    """uint8 [nbytes], the memory that another process of this machine (or this one) made.

    Raises:
        OSError: there is no such process here, or it is another user's.
    """
    found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(found, nbytes)
    finally:
        os.close(found)


def _sized(fd: int, nbytes: int) -> SharedMemory:
    os.ftruncate(fd, nbytes)
    return SharedMemory(fd, _mapped(fd, nbytes))


def _mapped(fd: int, nbytes: int) -> Tensor:
    memory = mmap.mmap(fd, nbytes)
    # Large pages are mapped faster, where the machine has them.
    with contextlib.suppress(OSError):
        memory.madvise(_MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
