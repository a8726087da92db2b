"""What a runner adapter calls. Each of vLLM's two model runners has one adapter, and nothing else
in midstream knows which runner there is.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from midstream.runtime.protocol.failures import put
from midstream.runtime.protocol.request_payload import payload_of
from midstream.runtime.worker.session import WorkerSession
from midstream.runtime.worker.step.step_batch import StepBatch, UnknownPositions


class Hooks:
    """The moments of a step."""

    def __init__(self, session: WorkerSession, ahead: int) -> None:
        """Args:
        session: the worker's.
        ahead: how many steps the scheduler may be ahead of what it knows was accepted.
        """
        self._session = session
        # How many tokens of each request were drafted: in this step, and in those of which the
        # scheduler did not know the outcome when it decided on this one.
        self._drafted: dict[str, int] = {}
        self._unknown: deque[dict[str, int]] = deque(maxlen=ahead)

    def on_schedule(self, scheduler_output: Any) -> None:
        """The scheduler's decision for a step: requests that ended, requests that begin."""
        if self._unknown.maxlen:
            drafted = scheduler_output.scheduled_spec_decode_tokens
            self._unknown.append(self._drafted)
            self._drafted = {name: len(tokens) for name, tokens in drafted.items()}
        for request_id in scheduler_output.finished_req_ids:
            self._session.finish(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            asked = payload_of(new.sampling_params)
            if asked is not None:
                self._session.grow(new.req_id, asked.uid, new.prompt_token_ids)
                self._session.add(new.req_id, asked.uid, asked.plan, new.num_computed_tokens)

    def late(
        self, request_ids: Sequence[str], positions: Callable[[], Tensor]
    ) -> UnknownPositions | None:
        """What the host does not know of the step's batch; None where it knows all.

        Args:
            request_ids: of the batch.
            positions: gives the rows' positions on the device.
        """
        unknown = [drafted for drafted in self._unknown if drafted]
        if not unknown:
            return None

        def slack() -> NDArray[np.int64]:
            # The scheduler counts drafted tokens as accepted until it knows better.
            return np.fromiter(
                (sum(drafted.get(name, 0) for drafted in unknown) for name in request_ids),
                np.int64,
            )

        return UnknownPositions(slack, positions)

    def before_forward(self, view: StepBatch) -> None:
        """The batch is laid out; its forward is queued next."""
        self._session.before_forward(view)

    def after_forward(self) -> None:
        """The forward is queued."""
        self._session.after_forward()

    def on_output(self, output: Any) -> Any:
        """A step's output is about to leave; what went wrong for single requests leaves with it.
        Where there is no way out, as from a pipeline's earlier stages, their receipts tell.
        """
        failures = self._session.failures
        if failures:
            told = put(output, failures)
            if told is not None:
                self._session.forget_failures()
                return told
        return output


def tell_failures(runner: Any, hooks: Hooks) -> None:
    """Hooks what a runner returns: by one or the other of two methods, as the step is."""
    for name in ("execute_model", "sample_tokens"):
        setattr(runner, name, _telling(getattr(runner, name), hooks))


def _telling(original: Callable[..., Any], hooks: Hooks) -> Callable[..., Any]:
    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return hooks.on_output(original(*args, **kwargs))

    return run
