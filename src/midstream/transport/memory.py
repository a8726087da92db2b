"""Memory that processes of one machine share: it has no name, so nothing of it can be left behind.

The kernel frees it when the last process that maps it has ended, however it ended.
"""

from __future__ import annotations

import functools
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


class SharedMemory:
    """Memory that this process made; it can be mapped as long as this object is there.

    Attributes:
        fd: what others of this machine map it by; see `map_shared`.
        tensor: uint8, all of it.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        """Args:
        fd: an open file, which is this object's from here on.
        nbytes: how large it is to be.
        """
        self.fd = fd
        self._ends = [weakref.finalize(self, os.close, fd)]
        os.ftruncate(fd, nbytes)
        self.tensor = _mapped(fd, nbytes)

    @staticmethod
    def create(nbytes: int) -> SharedMemory:
        """Zeroed memory; its pages are taken when they are first written."""
        return SharedMemory(os.memfd_create("midstream", os.MFD_CLOEXEC), nbytes)

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
        return SharedMemory(fd, nbytes)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.tensor.numel()

    def pin(self) -> None:
        """Keeps it where it is, so that a CUDA device writes into it by itself.

        Raises:
            torch.cuda.CudaError: the driver refuses.
        """
        address = self.tensor.data_ptr()
        _cuda("cudaHostRegister")(address, self.nbytes, 0)
        # The driver must not think that of addresses at which there is something else by then.
        unpin = weakref.finalize(self, _cuda("cudaHostUnregister"), address)
        unpin.atexit = False
        self._ends.append(unpin)

    def close(self) -> None:
        """Nobody can map it any more; who has it mapped keeps it."""
        for end in reversed(self._ends):
            end()


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


def _cuda(name: str) -> Callable[..., None]:
    call = getattr(torch.cuda.cudart(), name)

    @functools.wraps(call)
    def checked(*arguments: int) -> None:
        torch.cuda.check_error(int(call(*arguments)))

    return checked


def _mapped(fd: int, nbytes: int) -> Tensor:
    # Not by the mmap module: it keeps a file of its own open for each mapping.
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
