"""Controllers of running requests, in the engine core: they are given the scores of a step before
vLLM takes its tokens, and what they answer holds from the next position that is not scheduled.

Laws are called on the thread of the engine's steps, declared controllers in threads of their own
(`controller_calls`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from midstream.runtime.core.controller_calls import (
    ControllerCall,
    DeclaredCalls,
    load_all,
    make_calls,
)
from midstream.runtime.protocol.control import Control, control_source
from midstream.runtime.protocol.plan_version import PlanVersion
from midstream.runtime.protocol.step_scores import ScoreRun
from midstream.runtime.vllm.additional_config import controllers_of
from midstream.runtime.vllm.attributes import CONTROLLED, DECLARED
from midstream.spec.control_laws import Observed, read_law
from midstream.spec.controller import read_answer
from midstream.validation import kind, read_float32, show

# Beneath vLLM's logger, which has handlers in the engine core's process.
_LOGGER = logging.getLogger("vllm.midstream")


@dataclass(slots=True, eq=False)
class RunningController:
    """A request with a controller.

    Attributes:
        request: vLLM's Request.
        control: the controller.
        decide: is called with what was observed.
        calls: those of its declared controller; None: it is a law.
        reached: number of positions whose scores were taken. A position is taken once, also if it
            is computed again after a preemption.
        unseen: scores that it was not given yet, by probe.
        chosen: index of the version that holds, in `control.choices`.
        has_failed: whether it is not called again.
    """

    request: Any
    control: Control
    decide: Callable[[Observed], Any]
    calls: DeclaredCalls | None
    reached: int = 0
    unseen: dict[str, list[float]] = field(default_factory=dict)
    chosen: int = 0
    has_failed: bool = False

    def take(self, runs: Sequence[ScoreRun], stop: int, token: Callable[[int], int]) -> bool:
        """Take the scores of a step; return whether there are any that it was not given.

        Args:
            runs: the scores, ascending.
            stop: position up to which the tokens of the rows are those of the request.
            token: returns the token of a position.
        """
        if self.has_failed:
            return False
        for run in runs:
            start = max(run.first, self.reached)
            end = min(run.first + run.values.shape[0], stop)
            for probe in self.control.probes:
                where = probe.where
                if where.ranges == _EVERYWHERE and not where.matches:
                    low, high = start - run.first, max(0, end - run.first)
                    scores = run.values[low:high, probe.slot].tolist()
                else:
                    rows = [at - run.first for at in where.within(start, end, token)]
                    scores = run.values[rows, probe.slot].tolist()
                if scores:
                    self.unseen.setdefault(probe.name, []).extend(scores)
            self.reached = max(self.reached, end)
        return bool(self.unseen)

    def observed(self, as_tensors: bool) -> Observed:
        """Return what the controller is given now."""
        names = [probe.name for probe in self.control.probes]
        arrays = {name: np.array(self.unseen.get(name, ()), np.float32) for name in names}
        scores: Mapping[str, Any] = arrays
        if as_tensors:
            import torch

            scores = {name: torch.from_numpy(found) for name, found in arrays.items()}
        tokens = max(0, self.reached + 1 - self.request.num_prompt_tokens)
        return Observed(self.request.request_id, tokens, scores)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a request by its controller's answer.

    Attributes:
        version: holds from now on; None: what held before.
        reason: why it ends: its stop reason; None: it goes on.
        is_error: whether it ends with an error.
    """

    version: PlanVersion | None = None
    reason: str | None = None
    is_error: bool = False


_NOTHING = Decision()
_EVERYWHERE = ((0, None),)


def prepare(engine: Any) -> None:
    """Import the declared controllers of an engine core, at its start.

    Raises:
        ConfigError: the code of one cannot be imported.
    """
    DECLARED.set(engine, load_all(controllers_of(engine.vllm_config)))


def controlled(scheduler: Any, request: Any, control: Control) -> RunningController:
    """Return a request with its controller, which it gets with its first scores.

    Args:
        scheduler: vLLM's Scheduler.
        request: vLLM's Request.
        control: its controller.
    """
    found: RunningController | None = CONTROLLED.get(request)
    if found is None:
        calls = None
        if control.declared:
            calls = (DECLARED.get(scheduler) or {})[control.declared]
            decide = calls.new()
        else:
            ((word, given),) = control.law.items()
            decide = read_law(word, given)
        found = RunningController(request, control, decide, calls)
        CONTROLLED.set(request, found)
    return found


def decide(requests: Sequence[RunningController]) -> list[Decision]:
    """Call the controllers of requests that have new scores, and return what becomes of each.

    Args:
        requests: each has scores that its controller was not given.
    """
    calls: dict[int, ControllerCall] = {}
    batches: dict[int, tuple[DeclaredCalls, list[ControllerCall]]] = {}
    for nth, one in enumerate(requests):
        if one.has_failed:
            continue
        calls[nth] = ControllerCall(one.decide, one.observed(one.calls is not None))
        if one.calls is not None:
            batches.setdefault(id(one.calls), (one.calls, []))[1].append(calls[nth])
        else:
            calls[nth].make()
    made = {id(call.observed): call for call in make_calls(list(batches.values()))}
    found = []
    for nth, one in enumerate(requests):
        call = calls.get(nth)
        if call is not None and one.calls is not None:
            call = made.get(id(call.observed))
        if call is None:
            found.append(_NOTHING)  # its scores are kept for the next step
            continue
        one.unseen = {}
        problem = call.error
        if problem is None:
            try:
                found.append(_answered(one, call.answer))
                continue
            except Exception as error:  # noqa: BLE001 - also what an answer's own methods raise
                problem = str(error) if isinstance(error, ValueError) else type(error).__name__
        found.append(_failed(one, problem))
    return found


def _answered(one: RunningController, answer: object) -> Decision:
    """Return what becomes of a request by an answer.

    Raises:
        ValueError: it is no answer.
    """
    given = read_answer(answer)
    if not given:
        return _NOTHING
    if "stop" in given:
        return Decision(reason=control_source(one.control.name))
    choices = one.control.choices
    edits = given.get("edits", choices[one.chosen].edits)
    scale = read_float32(given.get("scale", 1.0))
    for nth, choice in enumerate(choices):
        if choice.edits == edits and choice.scale == scale:
            if nth == one.chosen:
                return _NOTHING
            one.chosen = nth
            return Decision(choice.version)
    sets = sorted({choice.edits for choice in choices})
    if edits not in sets:
        shown = show(edits) if isinstance(edits, str) else kind(edits)
        raise ValueError(f"it has no edits {shown}; it has {sets}")
    scales = sorted({choice.scale for choice in choices})
    raise ValueError(f"the scale {scale:g} is none of those that it has: {scales}")


def _failed(one: RunningController, problem: str) -> Decision:
    """Return what becomes of a request whose controller failed."""
    control = one.control
    one.has_failed = True
    shown = f"controller {control.name!r} failed: {problem}"
    if control.on_error == "end":
        return Decision(reason=shown, is_error=True)
    _LOGGER.warning(
        "%s (request %s; its policy is %s)", shown, one.request.request_id, control.on_error
    )
    if control.on_error == "off":
        one.chosen = 1
    version = control.choices[one.chosen].version
    return Decision(PlanVersion(len(control.choices) + version.number, version.plan, version.keys))
