"""What a device's signature tells of the taps: which fired, and how often."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from midstream.errors import TapError
from midstream.runtime.worker.tables.device_buffers import code
from midstream.sites import Tap


class TapSignature:
    """The taps of one rank, each of which is to fire once in every step."""

    def __init__(self, taps: Iterable[Tap]) -> None:
        self._taps = list(taps)
        self.signature = _wrap(sum(code(tap) for tap in self._taps))

    def check(self, signatures: NDArray[np.int32]) -> None:
        """Whether all fired once for each token of the engine's first step.

        Raises:
            TapError: they did not.
        """
        wrong = np.flatnonzero(signatures != self.signature)
        if wrong.size:
            found = self.diagnose(int(signatures[wrong[0]]))
            raise TapError(
                "midstream's taps did not all fire once in the engine's first step, so nothing "
                f"would be captured or edited rightly: {found}. If the model is compiled, clear "
                "the compile cache (VLLM_CACHE_ROOT); otherwise please report the model's "
                "architecture"
            )

    def diagnose(self, signature: int) -> str:
        """What a signature tells."""
        if signature == self.signature:
            return "every tap fired once"
        if signature == 0:
            return "no tap fired"
        missing = _wrap(self.signature - signature)
        for tap in self._taps:
            if code(tap) == missing:
                return f"the tap {tap[0]} of layer {tap[1]} did not fire"
            if code(tap) == _wrap(-missing):
                return f"the tap {tap[0]} of layer {tap[1]} fired twice"
        if _wrap(2 * self.signature) == signature:
            return "every tap fired twice"
        return "several taps did not fire, or fired twice"


def _wrap(value: int) -> int:
    """As a signed 32-bit integer, the way the device adds."""
    return (value + 2**31) % 2**32 - 2**31
