"""What went wrong for single requests on a worker, on its way to the engine core: in the output of
the step in which it was noticed.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from midstream.runtime.vllm.attributes import FAILURES


class Failure(NamedTuple):
    """Why a request cannot go on.

    Attributes:
        position: the first position that was, or may have been, computed without its edits.
        reason: what went wrong.
    """

    position: int
    reason: str


def put(output: Any, failures: dict[str, Failure]) -> Any:
    """A model runner's output that also says what went wrong; of which requests, by vLLM's id.

    Args:
        output: what the runner returned: a `ModelRunnerOutput`, an asynchronous one, or something
            else that does not reach the scheduler.
        failures: at least one.

    Returns:
        What to return in its place; None if there is nowhere to put it.
    """
    from vllm.v1.outputs import ModelRunnerOutput

    if isinstance(output, ModelRunnerOutput):
        # vLLM shares one empty output among steps.
        output = copy.copy(output)
        FAILURES.set(output, failures)
        return output
    for name in ("model_runner_output", "_model_runner_output"):
        inner = getattr(output, name, None)
        if isinstance(inner, ModelRunnerOutput):
            FAILURES.set(inner, failures)
            return output
    return None


def failures_of(output: Any) -> dict[str, Failure]:
    """What `put` put there."""
    return FAILURES.get(output) or {}
