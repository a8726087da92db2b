"""The final norm of rows of the stream, which the head reads then: the first half of a lens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from midstream.errors import UnsupportedError
from midstream.runtime.models.final_norm import find_final_norm


class RankLens:
    """Applies the final norm on the worker, after the forward pass of a step.

    Attributes:
        reason: why the model's stream cannot be decoded; empty if it can be.
    """

    def __init__(self, model: Any) -> None:
        """Args:
        model: the model of the runner, without taps.
        """
        self._norm: Any = None
        self.reason = ""
        try:
            self._norm = find_final_norm(model)
        except UnsupportedError as error:
            self.reason = str(error)
        if not hasattr(model, "compute_logits") and not self.reason:
            self.reason = f"{type(model).__qualname__} has no head"

    def __call__(self, stream: Tensor) -> Tensor:
        """Return what the head reads of rows of the stream, [n, hidden]."""
        # The forward by itself: no tap is called. Without a second half of the stream, no norm
        # returns one.
        normed: Tensor = self._norm.forward(stream.contiguous())
        return normed
