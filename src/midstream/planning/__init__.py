"""What a large capture will take, reckoned beforehand: bytes, rates, and what gives out first."""

from __future__ import annotations

from midstream.planning.advice import Advice, advise
from midstream.planning.job import Fleet, PlannedJob
from midstream.planning.load import Load, Resource, load_of
from midstream.planning.rates import Figure, Rates
from midstream.planning.shape import NAMED, ModelSize, read_model

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
