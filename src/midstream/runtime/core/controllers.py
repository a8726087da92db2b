"""Controllers of running requests, in the engine core: they are given the scores of a step before
vLLM takes its tokens, and what they answer holds from the next position that is not scheduled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from midstream.plan.control.control_laws import Observed, Threshold
from midstream.plan.control.controller import read_answer
from midstream.plan.positions.position_set import Reached
from midstream.plan.scores.rule import NO_TOKENS, RuleState
from midstream.runtime.core.controller_calls import (
    ControllerCall,
    DeclaredCalls,
    load_all,
    make_calls,
)
from midstream.runtime.protocol.control import Control, control_source
from midstream.runtime.protocol.plan_version import PlanVersion
from midstream.runtime.protocol.step_scores import ScoresOfStep
from midstream.runtime.vllm.additional_config import controllers_of
from midstream.runtime.vllm.attributes import CONTROLLED, DECLARED
from midstream.validation import kind, read_float32, show

# Beneath vLLM's logger, which has handlers in the engine core's process.
_LOGGER = logging.getLogger("vllm.midstream")


@dataclass(slots=True, eq=False)
class RunningController:
    """A request with a controller."""

    request: Any
    control: Control
    decide: Any  # a `Threshold`, or what is called with what was observed
    calls: DeclaredCalls | None  # of its declared controller; None: it is a `Threshold`
    choices: dict[tuple[str, float], int]  # index in `control.choices`, by set of edits and scale
    # Column of the scores that a `Threshold` reads; None: it is declared, or a rule makes them.
    slot: int | None = None
    # Number of positions whose scores were taken: each once, also if it is computed again after a
    # preemption.
    reached: int = 0
    # By probe, not given yet; those of several outputs are lists.
    unseen: dict[str, list[Any]] = field(default_factory=dict)
    states: dict[str, RuleState] = field(default_factory=dict)  # by probe with a rule
    read: dict[str, Reached] = field(default_factory=dict)  # by probe; see `Automaton.selected`
    chosen: int = 0  # index of the version that holds, in `control.choices`
    # The scale that it answered last, if it answered no more than that and the version of that
    # scale holds: the same once more changes nothing.
    answered: float | None = None
    has_failed: bool = False  # it is not called again

    def take(
        self, scores: ScoresOfStep, index: int, stop: int, token: Callable[[int], int]
    ) -> bool:
        """Take the scores of a step, of tokens before `stop`; return whether there are new ones."""
        if self.has_failed:
            return False
        first = scores.first[index]
        start, end = max(first, self.reached), min(first + scores.length[index], stop)
        for probe in self.control.probes:
            read = self.read.setdefault(probe.name, {})
            positions = probe.where.within(start, end, token, read)
            if probe.rule.is_plain:
                values = scores.at(index, probe.slot, positions)
            else:
                slots = range(probe.slot, probe.slot + probe.rule.columns)
                before = self.states.get(probe.name, NO_TOKENS)
                numbers = scores.numbers(index, slots, positions)
                self.states[probe.name], made = probe.rule.follow(before, numbers)
                values = made.tolist()
            if values:
                self.unseen.setdefault(probe.name, []).extend(values)
        self.reached = max(self.reached, end)
        return bool(self.unseen)

    def passes(self, scores: ScoresOfStep, row: int, position: int) -> bool:
        """Take a position's scores if a `Threshold` keeps its scale and state; return whether."""
        if self.slot is None or position < self.reached:
            return False
        # At a position that the probe does not read, it answers what it answered last.
        if not self.decide.holds(scores.column(self.slot)[row], self.answered):
            return False
        self.reached = position + 1
        return True

    @property
    def tokens(self) -> int:
        """Number of tokens that were generated up to the last score."""
        return max(0, self.reached + 1 - int(self.request.num_prompt_tokens))

    def observed(self) -> Observed:
        import torch

        scores = {
            probe.name: torch.from_numpy(
                np.array(self.unseen.get(probe.name, ()), np.float32).reshape(
                    (-1, probe.rule.outputs) if probe.rule.outputs else -1
                )
            )
            for probe in self.control.probes
        }
        return Observed(self.request.request_id, self.tokens, scores)

    def follow_threshold(self) -> Decision:
        """Ask its `Threshold`, with the scores that it was not given yet."""
        return self.take_answer(self.decide.follow(self.unseen.get(self.decide.probe, ())))

    def take_answer(self, answer: object, problem: str | None = None) -> Decision:
        self.unseen.clear()
        if problem is None:
            if answer is None or (type(answer) is float and answer == self.answered):
                return NOTHING
            try:
                return _answered(self, answer)
            except Exception as error:  # noqa: BLE001 - also what an answer's own methods raise
                problem = str(error) if isinstance(error, ValueError) else type(error).__name__
        return _failed(self, problem)


@dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of a request by its controller's answer."""

    version: PlanVersion | None = None  # holds from now on; None: what held before
    reason: str | None = None  # why it ends: its stop reason; None: it goes on
    is_error: bool = False


NOTHING = Decision()


def prepare(engine: Any) -> None:
    """Import the declared controllers of an engine core, at its start."""
    DECLARED.set(engine, load_all(controllers_of(engine.vllm_config)))


def controlled(scheduler: Any, request: Any, control: Control) -> RunningController:
    """Return a request with its controller, which it gets with its first scores."""
    running: RunningController | None = CONTROLLED.get(request)
    if running is None:
        calls = None
        if control.declared:
            calls = (DECLARED.get(scheduler) or {})[control.declared]
            decide = calls.new()
        else:
            decide = Threshold.parse(control.law)
        choices: dict[tuple[str, float], int] = {}
        for index, choice in enumerate(control.choices):
            choices.setdefault((choice.edits, choice.scale), index)
        slot: int | None = None
        if isinstance(decide, Threshold):
            (read,) = (probe for probe in control.probes if probe.name == decide.probe)
            slot = read.slot if read.rule.is_plain else None
        running = RunningController(request, control, decide, calls, choices, slot)
        CONTROLLED.set(request, running)
    return running


def decide(requests: Sequence[RunningController]) -> list[Decision]:
    """Call the controllers of requests, which have new scores, and return what becomes of each."""
    decisions = []
    calls: list[tuple[int, ControllerCall]] = []
    batches: dict[int, tuple[DeclaredCalls, list[ControllerCall]]] = {}
    for index, running in enumerate(requests):
        if running.calls is None and not running.has_failed:
            decisions.append(running.follow_threshold())
            continue
        decisions.append(NOTHING)
        if running.calls is not None and not running.has_failed:
            call = ControllerCall(running.decide, running.observed())
            calls.append((index, call))
            batches.setdefault(id(running.calls), (running.calls, []))[1].append(call)
    if calls:
        made = {id(call.observed): call for call in make_calls(list(batches.values()))}
        for index, call in calls:
            answered = made.get(id(call.observed))
            # Otherwise its scores are kept for the next step.
            if answered is not None:
                decisions[index] = requests[index].take_answer(answered.answer, answered.error)
    return decisions


def _answered(running: RunningController, answer: object) -> Decision:
    fields = {"scale": answer} if type(answer) is float else read_answer(answer)
    if not fields:
        return NOTHING
    if "stop" in fields:
        return Decision(reason=control_source(running.control.name))
    choices = running.control.choices
    edits = fields.get("edits", choices[running.chosen].edits)
    scale = fields.get("scale", 1.0)
    if type(scale) is not float:
        scale = read_float32(scale)
    chosen = running.choices.get((edits, scale)) if isinstance(edits, str) else None
    if chosen is not None:
        running.answered = answer if isinstance(answer, float) else None
        if chosen == running.chosen:
            return NOTHING
        running.chosen = chosen
        return Decision(choices[chosen].version)
    sets = sorted({choice.edits for choice in choices})
    if edits not in sets:
        shown = show(edits) if isinstance(edits, str) else kind(edits)
        raise ValueError(f"it has no edits {shown}; it has {sets}")
    read_float32(scale)
    scales = sorted({choice.scale for choice in choices})
    raise ValueError(f"the scale {scale:g} is none of those that it has: {scales}")


def _failed(running: RunningController, problem: str) -> Decision:
    control = running.control
    running.has_failed = True
    shown = f"controller {control.name!r} failed: {problem}"
    if control.on_error == "end":
        return Decision(reason=shown, is_error=True)
    _LOGGER.warning(
        "%s (request %s; its policy is %s)", shown, running.request.request_id, control.on_error
    )
    if control.on_error == "off":
        running.chosen = 1
    version = control.choices[running.chosen].version
    return Decision(PlanVersion(len(control.choices) + version.number, version.plan, version.keys))
