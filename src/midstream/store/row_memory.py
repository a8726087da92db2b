"""Memory of batches: pageable, or pinned where there is a CUDA device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from midstream.errors import StoreError


class RowMemory:
    """Makes the tensors of batches."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        """Return uint8 memory of any contents.

        Raises:
            StoreError: it would be pinned in a worker of a loader.
        """
        if self._pins():
            return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        # NumPy allocates huge pages, torch does not, which makes this twice as fast.
        return torch.from_numpy(np.empty(shape, np.uint8))

    def hold(self, tensor: Tensor) -> Tensor:
        """Return a tensor, pinned if this memory is."""
        return tensor.pin_memory() if self._pins() else tensor

    def _pins(self) -> bool:
        if not self._is_pinned:
            return False
        if get_worker_info():
            raise StoreError(
                "pin_memory: a loader's worker cannot pin memory; expected "
                "DataLoader(dataset, pin_memory=True)"
            )
        return torch.cuda.is_available()
