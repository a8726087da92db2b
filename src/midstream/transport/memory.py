"""Anonymous memory shared by processes; the kernel frees it with the last, even after a crash."""

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
    """Memory, uint8 `tensor`, that processes can map by `fd` until it is closed."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd, self.nbytes = fd, nbytes
        self._ends = [weakref.finalize(self, os.close, fd)]
        os.ftruncate(fd, nbytes)
        self.tensor = _mapped(fd, nbytes)

    @staticmethod
    def create(nbytes: int, pin: bool = False) -> SharedMemory:
        """Create zeroed memory; pages are allocated on first write, or when it is pinned."""
        memory = SharedMemory(os.memfd_create("midstream", os.MFD_CLOEXEC), nbytes)
        if pin:
            memory.pin()
        return memory

    @staticmethod
    def on_disk(nbytes: int, folder: Path) -> SharedMemory:
        """Create memory backed by an unnamed file in `folder`."""
        fd, path = tempfile.mkstemp(prefix="midstream-spill-", dir=folder)
        os.unlink(path)
        try:
            # Without allocation, a write to a full disk would kill the process with SIGBUS.
            os.posix_fallocate(fd, 0, nbytes)
        except OSError:
            os.close(fd)
            raise
        return SharedMemory(fd, nbytes)

    def pin(self) -> None:
        """Page-lock the memory, so that a CUDA device can write to it asynchronously."""
        address = self.tensor.data_ptr()
        _cuda("cudaHostRegister")(address, self.nbytes, 0)
        # Unregistered before unmapping: the address range may be reused by other memory.
        unpin = weakref.finalize(self, _cuda("cudaHostUnregister"), address)
        unpin.atexit = False
        self._ends.append(unpin)

    def close(self) -> None:
        """Unpin the memory and close its file descriptor; existing mappings stay valid."""
        for end in reversed(self._ends):
            end()


def map_shared(pid: int, fd: int, nbytes: int) -> Tensor:
    """Map shared memory that a process on this machine created, uint8 [nbytes]."""
    descriptor = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _mapped(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _cuda(name: str) -> Callable[..., None]:
    call = getattr(torch.cuda.cudart(), name)

    @functools.wraps(call)
    def checked(*arguments: int) -> None:
        torch.cuda.check_error(int(call(*arguments)))

    return checked


def _mapped(fd: int, nbytes: int) -> Tensor:
    # The mmap module would keep a duplicated descriptor open for each mapping.
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=nbytes, dtype=torch.uint8)
