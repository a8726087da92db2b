"""`midstream.AsyncLLM`: the asynchronous engine, with sweeps, questions, scores and `tune`."""

from __future__ import annotations

from midstream.api import async_llm
from midstream.lab.api.ask_calls import AsyncQuestions
from midstream.lab.api.cached_run import AsyncCachedRuns
from midstream.lab.api.evaluations import AsyncEvaluations
from midstream.lab.api.sweep_calls import AsyncSweeps


class AsyncLLM(AsyncSweeps, AsyncQuestions, AsyncEvaluations, AsyncCachedRuns, async_llm.AsyncLLM):
    """vLLM's asynchronous engine, with midstream enabled.

    The engine core runs in a process of its own. `info`, `vectors`, `steering` and `sites()` are
    available after `await llm.ready()`, or after the first `generate`.
    """
