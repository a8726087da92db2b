"""Activation patching over a grid of layers, sites, positions and heads, as one batch.

The types need neither vLLM nor torch. `midstream.lab.api.sweep` carries a sweep out on an engine.
"""

from __future__ import annotations

from midstream.lab.sweep.metrics import KL, LogitDiff, LogProb, Metric, Recovered
from midstream.lab.sweep.receipts import SweepReceipts
from midstream.lab.sweep.request import SweepRequest
from midstream.lab.sweep.result import Sweep

__all__ = [
    "KL",
    "LogProb",
    "LogitDiff",
    "Metric",
    "Recovered",
    "Sweep",
    "SweepReceipts",
    "SweepRequest",
]
