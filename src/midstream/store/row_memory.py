"""Memory of batches: pageable, or pinned where there is a CUDA device."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import get_worker_info

from midstream.errors import StoreError

_KEPT = 8  # pieces of memory of a size that are used again
_SIZES = 8


def _references(pieces: list[NDArray[np.uint8]], number: int) -> int:
    return sys.getrefcount(pieces[number])


# To memory that no batch uses; the number depends on the version of Python.
_UNUSED = _references([np.empty(0, np.uint8)], 0)


class RowMemory:
    """Makes the tensors of batches. Memory is used again once nothing refers to it.

    New memory must be cleared by the system page by page, which takes as long as the copy.
    """

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._kept: dict[int, list[NDArray[np.uint8]]] = {}
        self._lock = threading.Lock()

    # Workers of a loader begin without memory.
    def __reduce__(self) -> tuple[type[RowMemory], tuple[bool]]:
        return RowMemory, (self._is_pinned,)

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 memory of any contents.

        Raises:
            StoreError: it would be pinned in a worker of a loader.
        """
        if self._pins():
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        size = int(np.prod(shape))
        if self._process != os.getpid():
            # A thread that this fork lacks may hold the lock.
            self._begin()
        with self._lock:
            return torch.from_numpy(self._unused(size)[:size].reshape(shape))

    def hold(self, tensor: Tensor) -> Tensor:
        """Return a tensor, pinned if this memory is."""
        return tensor.pin_memory() if self._pins() else tensor

    def _unused(self, size: int) -> NDArray[np.uint8]:
        kept = self._kept.setdefault(size, []) if len(self._kept) < _SIZES else self._kept.get(size)
        for number in range(len(kept or [])):
            assert kept
            if _references(kept, number) <= _UNUSED:
                return kept[number]
        # NumPy allocates huge pages, torch does not, which makes this twice as fast.
        memory = np.empty(size, np.uint8)
        if kept is not None and len(kept) < _KEPT:
            kept.append(memory)
        return memory

    def _pins(self) -> bool:
        if not self._is_pinned:
            return False
        if get_worker_info():
            raise StoreError(
                "pin_memory: a loader's worker cannot pin memory; expected "
                "DataLoader(dataset, pin_memory=True)"
            )
        return torch.cuda.is_available()
