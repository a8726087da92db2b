"""Check of the device's signature: which taps fired, and how often."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from midstream.errors import TapError
from midstream.runtime.worker.tables.device_buffers import code
from midstream.sites import Tap


class TapSignature:
    """The signature of a token for which each tap of a rank fired once, as in every step.

    Attributes:
        signature: sum of the taps' codes, as a signed 32-bit integer.
    """

    def __init__(self, taps: Iterable[Tap]) -> None:
        self._taps = list(taps)
        self.signature = _wrap(sum(code(tap) for tap in self._taps))

    def check(self, signatures: NDArray[np.int32]) -> None:
        """Check that every tap fired once for each token of the engine's first step.

        Args:
            signatures: int32 [tokens], the tokens' signatures.

        Raises:
            TapError: a tap did not fire once.
        """
        wrong = np.flatnonzero(signatures != self.signature)
        if wrong.size:
            found = self.diagnose(int(signatures[wrong[0]]))
            raise TapError(
                "midstream's taps did not all fire once in the engine's first step, so captures "
                f"and edits would be wrong: {found}. If the model is compiled, clear the compile "
                "cache (VLLM_CACHE_ROOT); otherwise report the model's architecture"
            )

    def diagnose(self, signature: int) -> str:
        """Return what a token's signature says about the taps, as text."""
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
    """Return a value as a signed 32-bit integer, which is how the device adds."""
    return (value + 2**31) % 2**32 - 2**31
