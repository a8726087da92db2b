"""What the device buffers are armed for: the tokens, and where the step's rows go in the ring."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.ops import layout
from midstream.runtime.worker.tables.device_buffers import Buffers, upload

_NO_TOKENS = np.zeros((0, layout.TOKEN_COLUMNS), np.int32)
_CLOSED = -1  # as the ring unit at which a step's first record begins: nothing is captured


class ArmedBuffers:
    """Writer of what differs from step to step; `tally` and `scores` are the rows of the step."""

    def __init__(self, buffers: Buffers, only_armed: bool) -> None:
        self._buffers = buffers
        self._only_armed = only_armed
        self._tokens = _NO_TOKENS
        self._first = 0
        self._first_of_taps = buffers.table[:, 0, layout.FIRST]
        self.tally, self.scores = buffers.tally[:0], buffers.scores[:0]

    def arm(self, tokens: NDArray[np.int32], first: int) -> None:
        """Set tokens, int32 [rows, TOKEN_COLUMNS], and the first ring unit; clear the tally."""
        rows, before = tokens.shape[0], self._tokens.shape[0]
        if rows != self.tally.shape[0]:
            self.tally, self.scores = self._buffers.tally[:rows], self._buffers.scores[:rows]
        self.tally.zero_()
        self._set_first(first)
        if tokens is self._tokens or np.array_equal(tokens, self._tokens):
            return
        upload(self._buffers.tokens[:rows], torch.from_numpy(tokens))
        if before > rows:
            self._buffers.tokens[rows:before].zero_()
        self._tokens = tokens

    def close_ring(self) -> None:
        """Let no forward pass capture before the next step is armed, as rows are being copied."""
        if not self._only_armed:
            self._set_first(_CLOSED)

    def disarm(self) -> None:
        """Clear the tokens, if any, so that unarmed forward passes change and capture nothing."""
        if self._tokens.shape[0] and not self._only_armed:
            self._buffers.tokens[: self._tokens.shape[0]].zero_()
            self._tokens = _NO_TOKENS

    def _set_first(self, first: int) -> None:
        if first != self._first:
            self._first_of_taps.fill_(first)
            self._first = first

    def check_integrity(self) -> None:
        """Check that the device has what was armed last."""
        armed = self._tokens.shape[0]
        tokens = self._buffers.tokens[:armed].cpu().numpy().copy()
        if (self._tokens[:, layout.POSITION] < 0).any():  # the device has set these positions
            tokens[:, layout.POSITION] = self._tokens[:, layout.POSITION]
        assert np.array_equal(tokens, self._tokens)
        assert not bool(self._buffers.tokens[armed:].any())
        assert bool((self._first_of_taps == self._first).all())
