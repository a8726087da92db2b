"""Check of the device's signature: which taps fired, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from midstream.errors import TapError
from midstream.ops import layout
from midstream.runtime.worker.tables.device_buffers import Buffers, code
from midstream.sites import Tap


class TapSignature:
    """The signature of a token for which each tap of a rank fired once: the sum of their codes."""

    def __init__(self, taps: Iterable[Tap]) -> None:
        self._taps = list(taps)
        self.signature = _wrap(sum(code(tap) for tap in self._taps))

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


def check_taps(buffers: Buffers, taps: Iterable[Tap], run: Callable[[], object]) -> None:
    """Check that every tap fires once in `run`, which runs the tapped model on a row or more."""
    buffers.tally[:1].zero_()
    buffers.tokens[:1, layout.PROGRAM].fill_(layout.WATCH_PROGRAM)
    run()
    actual = int(buffers.tally[0, layout.SIGNATURE].item())
    buffers.tokens[:1].zero_()
    signature = TapSignature(taps)
    if actual != signature.signature:
        raise TapError(
            "midstream's taps did not all fire once in a trial run, so captures and edits would be "
            f"wrong: {signature.diagnose(actual)}. If the model is compiled, clear the compile "
            "cache (VLLM_CACHE_ROOT); otherwise report the model's architecture"
        )


def _wrap(value: int) -> int:
    """Return a value as a signed 32-bit integer, which is how the device adds."""
    return (value + 2**31) % 2**32 - 2**31
