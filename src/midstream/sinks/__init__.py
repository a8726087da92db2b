"""Sinks, destinations for captured rows besides the request's output; see `docs/sinks.md`."""

from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Delivery, Origin, Sink

__all__ = ["CaptureResult", "Delivery", "Origin", "Sink"]
