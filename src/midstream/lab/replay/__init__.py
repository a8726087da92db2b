"""Records of requests and the bits of their results, run again; fingerprints of inference."""

from __future__ import annotations

from midstream.lab.replay.fingerprint import Fingerprint, Verdict, fingerprint, verify
from midstream.lab.replay.record import RecordedRequest, Recorder, read_records
from midstream.lab.replay.run import Difference, ReplayReport, replay

__all__ = [
    "Difference",
    "Fingerprint",
    "RecordedRequest",
    "Recorder",
    "ReplayReport",
    "Verdict",
    "fingerprint",
    "read_records",
    "replay",
    "verify",
]
