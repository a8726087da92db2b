"""Attaching failures of single requests, and reported scores, to the output of a step."""

from __future__ import annotations

import copy
from typing import Any

from midstream.runtime.protocol.failures import Failure
from midstream.runtime.protocol.step_scores import StepScores
from midstream.runtime.vllm.attributes import FAILURES, STEP_SCORES


def attach(output: Any, failures: dict[str, Failure], scores: StepScores | None = None) -> Any:
    """Return a model runner's output with failures, by vLLM's request id, and reported scores; None
    if the output does not reach the scheduler. It may be asynchronous, holding another.
    """
    from vllm.v1.outputs import ModelRunnerOutput

    if isinstance(output, ModelRunnerOutput):
        # Steps share vLLM's one empty output.
        output = copy.copy(output)
        _set(output, failures, scores)
        return output
    for name in ("model_runner_output", "_model_runner_output"):
        inner = getattr(output, name, None)
        if isinstance(inner, ModelRunnerOutput):
            _set(inner, failures, scores)
            return output
    return None


def _set(output: Any, failures: dict[str, Failure], scores: StepScores | None) -> None:
    if failures:
        FAILURES.set(output, failures)
    if scores is not None:
        STEP_SCORES.set(output, scores)
