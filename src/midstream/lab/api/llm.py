"""`midstream.LLM`: the offline engine, with sweeps, scores of texts and `tune`."""

from __future__ import annotations

from midstream.api import llm
from midstream.lab.api.cached_run import CachedRuns
from midstream.lab.api.evaluations import Evaluations
from midstream.lab.api.sweep_calls import OfflineSweeps


class LLM(OfflineSweeps, Evaluations, CachedRuns, llm.LLM):
    """vLLM's offline engine, with midstream enabled."""
