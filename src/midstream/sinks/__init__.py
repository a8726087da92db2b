"""Where captured rows may go besides the output of their request; `docs/sinks.md` has how."""

from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Delivery, Origin, Sink

__all__ = ["CaptureResult", "Delivery", "Origin", "Sink"]
