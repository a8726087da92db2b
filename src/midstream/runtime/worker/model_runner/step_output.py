"""Attaching failures of single requests to the output of a step."""

from __future__ import annotations

import copy
from typing import Any

from midstream.runtime.protocol.failures import Failure
from midstream.runtime.vllm.attributes import FAILURES


def attach_failures(output: Any, failures: dict[str, Failure]) -> Any:
    """Attach failures to what a model runner returned.

    Args:
        output: a ModelRunnerOutput, an asynchronous output that holds one, or another value, which
            does not reach the scheduler.
        failures: at least one, by vLLM's request id.

    Returns:
        The output to return instead; None if this one does not reach the scheduler.
    """
    from vllm.v1.outputs import ModelRunnerOutput

    if isinstance(output, ModelRunnerOutput):
        # Steps share vLLM's one empty output.
        output = copy.copy(output)
        FAILURES.set(output, failures)
        return output
    for name in ("model_runner_output", "_model_runner_output"):
        inner = getattr(output, name, None)
        if isinstance(inner, ModelRunnerOutput):
            FAILURES.set(inner, failures)
            return output
    return None
