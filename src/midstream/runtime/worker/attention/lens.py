"""Logits of the stream: the model's own final norm, then its own head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from midstream.errors import UnsupportedError
from midstream.runtime.models.final_norm import find_final_norm


class RankLens:
    """Decodes rows of the stream on the worker, after the forward pass of a step.

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
        # As it is before biases are added to what it returns.
        self._head = getattr(model, "compute_logits", None)
        if self._head is None and not self.reason:
            self.reason = f"{type(model).__qualname__} has no head"

    def __call__(self, stream: Tensor) -> Tensor:
        """Return the logits [n, tokens] of rows of the stream, [n, hidden]."""
        assert self._head is not None
        # The forward by itself: no tap is called. Without a second half of the stream, no norm
        # returns one.
        logits: Tensor = self._head(self._norm.forward(stream))
        return logits
