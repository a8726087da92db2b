"""`midstream plan`: estimate of a capture job's data volume, speed and first bottleneck."""

from __future__ import annotations

from midstream.tools.capacity.advice import Advice, advise
from midstream.tools.capacity.job import Fleet, PlannedJob
from midstream.tools.capacity.load import Load, Resource, load_of
from midstream.tools.capacity.rates import Figure, Rates
from midstream.tools.capacity.shape import NAMED, ModelSize, read_model

__all__ = [
    "NAMED",
    "Advice",
    "Figure",
    "Fleet",
    "Load",
    "ModelSize",
    "PlannedJob",
    "Rates",
    "Resource",
    "advise",
    "load_of",
    "read_model",
]
