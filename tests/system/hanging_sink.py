"""A sink that never returns, as one on a network disk that does not answer."""

from __future__ import annotations

import threading

from midstream.results.receipt import CaptureResult
from midstream.sinks import Delivery, Sink


class HangingSink(Sink):
    def write(self, delivery: Delivery) -> CaptureResult | None:
        threading.Event().wait()
        return None
