"""Activation patching over a grid of layers, sites, positions and heads, as one batch.

The types need neither vLLM nor torch. `midstream.api.sweep` carries a sweep out on an engine.
"""

from __future__ import annotations

from midstream.sweep.metrics import KL, LogitDiff, LogProb, Metric, Recovered
from midstream.sweep.receipts import SweepReceipts
from midstream.sweep.request import SweepRequest
from midstream.sweep.result import Sweep

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
