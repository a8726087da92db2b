"""Memory of a worker for registered weights: maps of lenses, and encoders of SAEs."""

from __future__ import annotations

import torch
from torch import Tensor


class RankWeights:
    """One tensor on the device. What is where in it, the front end decides."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(nbytes // 4 * 4, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self._bytes.numel()

    def write(self, offset: int, data: bytes) -> None:
        if data:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._bytes[offset : offset + len(data)].copy_(tensor)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """Return the memory as numbers of a dtype, [numbers]."""
        return self._bytes.view(dtype)
