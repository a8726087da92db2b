"""Records of requests and the bits of their results, run again."""

from __future__ import annotations

from midstream.lab.replay.record import RecordedRequest, Recorder, read_records
from midstream.lab.replay.run import Difference, ReplayReport, replay

__all__ = [
    "Difference",
    "RecordedRequest",
    "Recorder",
    "ReplayReport",
    "read_records",
    "replay",
]
