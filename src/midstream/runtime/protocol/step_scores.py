"""Probe scores of one step, from a worker to the engine core in the output of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from midstream.runtime.vllm.attributes import STEP_SCORES


class ScoreRun(NamedTuple):
    """Scores of consecutive positions of a request.

    Attributes:
        first: the first position.
        values: float32 [positions, slots].
    """

    first: int
    values: NDArray[np.float32]


ScoresOfStep = dict[str, list[ScoreRun]]  # by vLLM's request id


class StepScores:
    """Scores of the requests of a step that report them, on their way from the device.

    Nothing waits for them until they are read, or pickled for the engine core's process: after the
    step's tokens have arrived, which the device computes later.
    """

    def __init__(self, read: Callable[[], ScoresOfStep]) -> None:
        """Args:
        read: returns the scores; may block until they are on the host.
        """
        self._read = read

    def values(self) -> ScoresOfStep:
        """Return the scores of each request."""
        return self._read()

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.values(),)


def _arrived(values: ScoresOfStep) -> StepScores:
    return StepScores(lambda: values)


def scores_of(output: Any) -> StepScores | None:
    """Return the scores that a worker attached to a ModelRunnerOutput; None: there are none."""
    return STEP_SCORES.get(output)
