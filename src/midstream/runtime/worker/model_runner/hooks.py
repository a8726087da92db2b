"""Calls of the adapter of either of vLLM's model runners into a `WorkerSession`."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from midstream.call_frames import with_room_for_calls
from midstream.runtime.protocol.failures import Failure
from midstream.runtime.protocol.request_payload import payload_of
from midstream.runtime.protocol.step_scores import StepScores
from midstream.runtime.vllm.attributes import FAILURES, STEP_SCORES
from midstream.runtime.worker.model_runner.model_switch import PLAIN, ModelSwitch
from midstream.runtime.worker.session import WorkerSession
from midstream.runtime.worker.step.step_batch import StepBatch, UnknownPositions


class Hooks:
    """The moments of a step."""

    def __init__(self, session: WorkerSession, switch: ModelSwitch, ahead: int) -> None:
        self._session = session
        self._switch = switch
        # Number of draft tokens of each request: in this step, and in those whose outcome the
        # scheduler did not know when it decided on this step.
        self._drafted: dict[str, int] = {}
        self._unknown: deque[dict[str, int]] = deque(maxlen=ahead)
        # vLLM's own, which its runner may still change: by request, its draft tokens of this step.
        self._drafts: Mapping[str, Sequence[int]] = {}
        self._prompt_lengths: dict[str, int] = {}  # of requests with a plan

    def on_schedule(self, scheduler_output: Any) -> set[str]:
        """Finish and add requests; return vLLM's ids of finished ones with a non-finite value."""
        self._drafts = scheduler_output.scheduled_spec_decode_tokens
        if self._unknown.maxlen:
            self._unknown.append(self._drafted)
            self._drafted = {name: len(tokens) for name, tokens in self._drafts.items()}
        requests = self._session.requests
        nonfinite = requests.pop_nonfinite(scheduler_output.finished_req_ids)
        requests.finish(scheduler_output.finished_req_ids)
        for name in scheduler_output.finished_req_ids:
            self._prompt_lengths.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            payload = payload_of(new.sampling_params)
            if payload is not None:
                self._switch.prepare()
                requests.grow(new.req_id, payload.uid, new.prompt_token_ids)
                requests.add(
                    new.req_id,
                    payload.uid,
                    payload.plan,
                    new.num_computed_tokens,
                    payload.reports,
                    payload.split,
                )
                length = len(new.prompt_token_ids or ())
                has_grown = length > self._prompt_lengths.get(new.req_id, length)
                self._prompt_lengths[new.req_id] = length
                scores, cached = payload.keys.scores, new.num_computed_tokens
                self._session.place_scores(new.req_id, scores, new.block_ids, cached, has_grown)
        if self._session.keeps_scores:
            self._add_blocks(scheduler_output.scheduled_cached_reqs)
        return nonfinite

    def _add_blocks(self, scheduled: Any) -> None:
        """Note new blocks of running requests, whose scores are kept by block."""
        resumed = scheduled.resumed_req_ids
        for index, blocks in enumerate(scheduled.new_block_ids):
            if blocks is None:
                continue
            name = scheduled.req_ids[index]
            if name in resumed:
                cached = scheduled.num_computed_tokens[index]
                self._session.place_scores(name, (), blocks, cached)
            else:
                self._session.add_blocks(name, blocks)

    def unknown_positions(
        self, request_ids: Sequence[str], positions: Callable[[], Tensor]
    ) -> UnknownPositions | None:
        """Return what the host does not know about a step's batch; None if it knows all."""
        unknown = [drafted for drafted in self._unknown if drafted]
        if not unknown:
            return None

        def slack() -> NDArray[np.int64]:
            # The scheduler counts draft tokens as accepted until it knows the outcome.
            return np.fromiter(
                (sum(drafted.get(name, 0) for drafted in unknown) for name in request_ids),
                np.int64,
            )

        return UnknownPositions(slack, positions)

    def drafts(self, request_ids: Sequence[str]) -> NDArray[np.int64] | None:
        """Return how many tokens of each request of a step's batch are drafts; None: none are."""
        drafts = self._drafts
        if not drafts:
            return None
        return np.fromiter((len(drafts.get(name, ())) for name in request_ids), np.int64)

    def before_forward(self, batch: StepBatch) -> None:
        """Prepare a step whose batch is laid out; its forward pass is queued next."""
        self._switch.use(self._session.before_forward(batch))

    def after_forward(self) -> None:
        """Record a step whose forward pass is queued."""
        self._switch.use(PLAIN)
        self._session.after_forward()

    def on_output(self, output: Any) -> Any:
        """Return a step's output with failures and scores; unchanged if it misses the scheduler."""
        session = self._session
        if not session.has_reports:
            return output
        requests = session.requests
        attached = attach_results(output, requests.failures, session.reported_scores)
        if attached is None:
            return output
        requests.clear_failures()
        session.clear_reported_scores()
        return attached


def report_results(runner: Any, hooks: Hooks) -> None:
    """Wrap both methods by which a runner returns a step's output; see `Hooks.on_output`."""
    for name in ("execute_model", "sample_tokens"):
        setattr(runner, name, _with_results(getattr(runner, name), hooks))


def _with_results(original: Callable[..., Any], hooks: Hooks) -> Callable[..., Any]:
    # For executors whose workers have no loop of vLLM's that makes room, as those of Ray's graphs.
    original = with_room_for_calls(original)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        return hooks.on_output(original(*args, **kwargs))

    return run


def attach_results(
    output: Any, failures: dict[str, Failure], scores: StepScores | None = None
) -> Any:
    """Return a runner's output with failures and scores; None if the scheduler does not get it."""
    from vllm.v1.outputs import ModelRunnerOutput

    if isinstance(output, ModelRunnerOutput):
        # Steps share vLLM's one empty output.
        output = copy.copy(output)
        _attach_to(output, failures, scores)
        return output
    for name in ("model_runner_output", "_model_runner_output"):
        inner = getattr(output, name, None)
        if isinstance(inner, ModelRunnerOutput):
            _attach_to(inner, failures, scores)
            return output
    return None


def _attach_to(output: Any, failures: dict[str, Failure], scores: StepScores | None) -> None:
    if failures:
        FAILURES.set(output, failures)
    if scores is not None:
        STEP_SCORES.set(output, scores)
