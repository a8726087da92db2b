"""Functions of rows and of numbers, in PyTorch: those of gates, and of hidden units of MLPs."""

from __future__ import annotations

import torch
from torch import Tensor


def activated(x: Tensor, numbers: Tensor) -> Tensor:
    """Return the activations with the given numbers, [n]."""
    functional = torch.nn.functional
    every = (functional.relu(x), functional.gelu(x), torch.tanh(x), functional.silu(x))
    return torch.stack(every).gather(0, numbers.long()[None])[0]


def sigmoid(x: Tensor) -> Tensor:
    """Return σ(x) without overflow; exactly 0 or 1 for large |x|."""
    small = torch.exp(-x.abs())
    return torch.where(x >= 0, 1.0, small) / (1.0 + small)


def norm(vectors: Tensor) -> Tensor:
    """Return ‖v‖ of each row, [n]; bit-identical for equal rows of one batch."""
    return (vectors * vectors).sum(1).sqrt()
