"""`midstream plan`: estimate of a capture job's data volume, speed and first bottleneck."""

from __future__ import annotations

from midstream.tools.capacity.advice import advise
from midstream.tools.capacity.job import Fleet, PlannedJob
from midstream.tools.capacity.load import load_of
from midstream.tools.capacity.shape import NAMED, read_model

__all__ = ["NAMED", "Fleet", "PlannedJob", "advise", "load_of", "read_model"]
