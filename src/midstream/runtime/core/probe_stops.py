"""Probes that end their request or switch its edits, and controllers, on the scores of each step. A
step's tokens are cut where a request ends; edits hold from the next unscheduled position.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from midstream.plan.control.act import Condition, Progress, follow
from midstream.plan.positions.position_set import Reached
from midstream.runtime.core.controllers import NOTHING, RunningController, controlled, decide
from midstream.runtime.core.ended_requests import add_end, finish
from midstream.runtime.core.plan_versions import change_plans
from midstream.runtime.protocol.acting_probes import ActingProbe, probe_source
from midstream.runtime.protocol.plan_version import PlanVersion
from midstream.runtime.protocol.request_payload import payload_of
from midstream.runtime.protocol.step_scores import Bounds, ScoresOfStep, scores_of
from midstream.runtime.vllm.attributes import WATCHED

_FEW = 16  # scores, which a list holds as fast as NumPy
_KNOWN = 1024  # sets of ranges, whose bounds are made once


class ReadRange(NamedTuple):
    """A probe's last range of positions; scores from `low` to `high` meet no condition."""

    slot: int
    start: int
    stop: float
    low: float
    high: float


def read_ranges(probes: Sequence[ActingProbe]) -> tuple[ReadRange, ...] | None:
    """Return the last range of each probe; None: one has none, or has a rule or pools scores."""
    ranges = []
    for probe in probes:
        condition = probe.condition
        if condition.pool != "none" or not probe.rule.is_plain or not probe.where.ranges:
            return None
        start, stop = probe.where.ranges[-1]
        low, high = bounds_of(condition)
        ranges.append(ReadRange(probe.slot, start, math.inf if stop is None else stop, low, high))
    return tuple(ranges)


def bounds_of(condition: Condition) -> tuple[float, float]:
    """Return the lowest and the highest score that do not meet a condition without a pool."""
    low = -math.inf if condition.below is None else condition.below
    high = math.inf if condition.above is None else condition.above
    return low, high


@functools.lru_cache(_KNOWN)
def _bounds(ranges: tuple[ReadRange, ...]) -> tuple[int, float, Bounds]:
    """Return the positions [start, stop) that all ranges hold, and the bounds of their scores."""
    slots, starts, stops, low, high = zip(*ranges, strict=True)
    bounds = Bounds(np.array(slots), np.array(low, np.float64), np.array(high, np.float64))
    return max(starts), min(stops), bounds


@dataclass(slots=True, eq=False)
class Watched:
    """A request whose scores are evaluated."""

    params: Any  # its sampling parameters; those of a session change with its inputs
    acts: tuple[ActingProbe, ...]
    ranges: tuple[ReadRange, ...] | None  # where they read, if `passes` can evaluate them
    controller: RunningController | None
    # Number of positions whose probes were evaluated: each once, also if it is computed again after
    # a preemption.
    reached: int
    # How far the condition of each probe is; None: it has switched the edits, once.
    each: tuple[Progress | None, ...]
    # Of each probe, what its automata have read; see `Automaton.selected`.
    read: tuple[Reached, ...] = ()
    # While no condition has begun to be met: the positions that all ranges hold, and the bounds of
    # scores there that meet none.
    start: int = 0
    stop: float = 0
    bounds: Bounds | None = None

    def __post_init__(self) -> None:
        self.take(self.reached, self.each)

    def take(self, reached: int, each: tuple[Progress | None, ...]) -> None:
        """Set how many positions were evaluated, and how far each condition is."""
        self.reached, self.each, self.bounds = reached, each, None
        if self.ranges and not any(known is None or known.run for known in each):
            self.start, self.stop, self.bounds = _bounds(self.ranges)

    def passes(self, scores: ScoresOfStep, index: int, request: Any) -> bool:
        """Take a step's scores if they are of one position and change nothing; return whether."""
        position = scores.first[index]
        if self.ranges is None or scores.length[index] != 1 or position >= request.num_tokens:
            return False
        if self.params is not request.sampling_params:
            return False
        row = scores.row[index]
        if self.ranges and position < self.reached:
            return False
        if self.ranges and not self._is_met_by_none(scores, row, position):
            return False
        if self.controller is not None and not self.controller.passes(scores, row, position):
            return False
        if self.ranges:
            self.reached = position + 1
        return True

    def _is_met_by_none(self, scores: ScoresOfStep, row: int, position: int) -> bool:
        """Return whether the scores of a position are read by ranges and meet no condition."""
        assert self.ranges is not None
        if self.bounds is not None and self.start <= position < self.stop:
            return scores.within(self.bounds)[row]
        for place, (slot, start, stop, low, high) in enumerate(self.ranges):
            progress = self.each[place]
            if progress is None:
                continue
            if progress.run or not start <= position < stop:
                return False
            if not low <= scores.column(slot)[row] <= high:
                return False
        return True


class ProbeProgress(NamedTuple):
    """How far the conditions of a request's probes are; see `Watched`."""

    reached: int
    each: tuple[Progress | None, ...]
    read: tuple[Reached, ...] = ()


@dataclass(frozen=True, slots=True)
class Firing:
    """A condition that was met, or a controller's answer."""

    name: str  # of the probe or the controller
    position: int  # of the token whose score met it, or that has the last score
    version: PlanVersion | None = None
    reason: str | None = None  # the stop reason, if it ends the request; None: that of the probe
    is_error: bool = False  # the request ends with an error


@dataclass(slots=True, eq=False)
class _Evaluated:
    """A request of which something is to be done, before and after vLLM takes a step's tokens."""

    request: Any
    known: int  # tokens before the step
    stop: int  # position up to which its scores were evaluated
    # Of its probes, if vLLM takes the tokens; None: it is set already.
    progress: ProbeProgress | None = None
    firing: Firing | None = None  # the condition that was met and ends it
    switched: tuple[Firing, ...] = ()  # conditions that switch its edits, by position
    chosen: PlanVersion | None = None  # by its controller


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduled: Any, output: Any
) -> Any:
    """Call vLLM's method, with the tokens of requests that stop cut; end these, switch others."""
    scores = scores_of(output)
    if scores is None:
        return original(scheduler, scheduled, output)
    evaluations = _evaluate(scheduler, output, scores.values())
    ended: list[tuple[Any, Firing, Any]] = []
    for evaluation in evaluations:
        request, firing = evaluation.request, evaluation.firing
        if firing is not None and not _cut(output, evaluation, firing):
            # Nothing is left: vLLM would look for a token where there are prompt logprobs.
            logprobs = output.prompt_logprobs_dict.get(request.request_id)
            for _ in finish(scheduler, request.request_id, firing.is_error):
                ended.append((request, firing, logprobs))
    outputs = original(scheduler, scheduled, output)
    changes = []
    for evaluation in evaluations:
        request, firing = evaluation.request, evaluation.firing
        if evaluation.chosen is not None and not request.is_finished():
            changes.append((request, evaluation.chosen, 0))
        # vLLM drops the tokens of some steps that a preemption overtook. Draft tokens of these
        # were evaluated in vain.
        if request.num_tokens == evaluation.known < evaluation.stop:
            continue
        watched: Watched | None = WATCHED.get(request)
        if evaluation.progress is not None and watched is not None:
            watched.take(evaluation.progress.reached, evaluation.progress.each)
        if firing is not None and not request.is_finished():
            for _ in finish(scheduler, request.request_id, firing.is_error):
                ended.append((request, firing, None))
        if not request.is_finished():
            # After a preemption the token that met the condition may be computed again.
            changes += [
                (request, switch.version, switch.position + 1)
                for switch in evaluation.switched
                if switch.version is not None
            ]
    if changes:
        change_plans(scheduler, changes)
    for request, firing, logprobs in ended:
        add_end(outputs, request, firing.reason or probe_source(firing.name), logprobs)
    return outputs


def _evaluate(scheduler: Any, output: Any, scores: ScoresOfStep) -> list[_Evaluated]:
    """Evaluate the scores of a step; return the requests of which something is to be done."""
    places, sampled = output.req_id_to_index, output.sampled_token_ids
    has_drafts = max(map(len, sampled or ()), default=0) > 1
    evaluations: list[_Evaluated] = []
    asked: list[tuple[RunningController, _Evaluated | None, int, int]] = []
    for index, request in changing(scheduler.requests, scores, has_drafts):
        if request.is_finished():
            continue
        name, watched = request.request_id, WATCHED.get(request)
        if watched is None or watched.params is not request.sampling_params:
            watched = _watch(scheduler, request)
        new = sampled[places[name]] if sampled else ()
        known = request.num_tokens
        # The last sampled token has no score yet; those before it are drafts, which were accepted.
        stop = known + max(len(new) - 1, 0)
        token = functools.partial(_token, request, known, new)
        evaluation = None
        if watched.acts:
            progress, firing, switched = advance(
                watched.acts,
                ProbeProgress(watched.reached, watched.each, watched.read),
                scores,
                index,
                stop,
                token,
            )
            if stop == known:
                watched.take(progress.reached, progress.each)
            if stop != known or firing is not None or switched:
                later = None if stop == known else progress
                evaluation = _Evaluated(request, known, stop, later, firing, switched)
                evaluations.append(evaluation)
        controller = watched.controller
        if controller is not None:
            # What vLLM may drop is computed again, and taken then.
            sure = known if stop != known and is_overtaken(request) else stop
            if controller.take(scores, index, sure, token):
                asked.append((controller, evaluation, known, stop))
    decisions = decide([controller for controller, _, _, _ in asked])
    for (controller, evaluation, known, stop), decision in zip(asked, decisions, strict=True):
        if decision is NOTHING:
            continue
        if evaluation is None:
            evaluation = _Evaluated(controller.request, known, stop)
            evaluations.append(evaluation)
        at = controller.reached - 1
        if decision.reason is not None and (
            evaluation.firing is None or at < evaluation.firing.position
        ):
            reason, is_error = decision.reason, decision.is_error
            evaluation.firing = Firing(
                controller.control.name, at, reason=reason, is_error=is_error
            )
        elif decision.version is not None:
            evaluation.chosen = decision.version
    return evaluations


def changing(
    requests: Mapping[str, Any], scores: ScoresOfStep, has_drafts: bool
) -> list[tuple[int, Any]]:
    """Return the requests, with their index, whose scores of a step must be evaluated. Others are
    taken: scores of one position, as most steps have of each request, which change nothing.
    """
    left: list[tuple[int, Any]] = []
    known: Bounds | None = None
    is_within: list[bool] = []
    get, attribute = requests.get, WATCHED.name
    columns = scores.ids, scores.first, scores.row, scores.length
    # Without a call of Python's for each request, except for the number of its tokens.
    for index, (name, position, row, length) in enumerate(zip(*columns, strict=True)):
        request = get(name)
        if request is None:
            continue
        watched: Watched | None = getattr(request, attribute, None)
        if has_drafts or watched is None:
            left.append((index, request))
        elif watched.bounds is None or watched.controller is not None:
            if not watched.passes(scores, index, request):
                left.append((index, request))
        else:
            if watched.bounds is not known:
                known, is_within = watched.bounds, scores.within(watched.bounds)
            if (
                length == 1
                and is_within[row]
                and watched.start <= position < watched.stop
                and watched.reached <= position < request.num_tokens
                and watched.params is request.sampling_params
            ):
                watched.reached = position + 1
            else:
                left.append((index, request))
    return left


def _watch(scheduler: Any, request: Any) -> Watched:
    """Return a request as it is watched from now on; what it has reached stays."""
    payload = payload_of(request.sampling_params)
    acts = () if payload is None else payload.acts
    control = None if payload is None else payload.control
    before: Watched | None = WATCHED.get(request)
    watched = Watched(
        request.sampling_params,
        acts,
        read_ranges(acts),
        None if control is None else controlled(scheduler, request, control),
        0 if before is None else before.reached,
        (Progress(),) * len(acts) if before is None else before.each,
        tuple({} for _ in acts),
    )
    WATCHED.set(request, watched)
    return watched


def _token(request: Any, known: int, new: Sequence[int], position: int) -> int:
    """Return the token of a request at a position, also of those that a step sampled for it."""
    return int(request.all_token_ids[position] if position < known else new[position - known])


def is_overtaken(request: Any) -> bool:
    """Return whether a preemption may have overtaken a step of a request, to be computed anew."""
    from vllm.v1.request import RequestStatus

    is_stale = getattr(request, "num_stale_output_tokens", 0) > 0
    return is_stale or request.status == RequestStatus.PREEMPTED


def advance(
    probes: Sequence[ActingProbe],
    before: ProbeProgress,
    scores: ScoresOfStep,
    index: int,
    stop: int,
    token: Callable[[int], int],
) -> tuple[ProbeProgress, Firing | None, tuple[Firing, ...]]:
    """Evaluate conditions on a step's scores of tokens before `stop`; return how far they are, the
    first that stops, and those that switch.
    """
    probe_progress = list(before.each)
    reached, first = before.reached, scores.first[index]
    start, end = max(first, reached), min(first + scores.length[index], stop)
    firing = None
    switched = []
    for probe_index, probe in enumerate(probes):
        progress = probe_progress[probe_index]
        if progress is None:
            continue
        read = before.read[probe_index] if before.read else None
        condition = probe.condition
        positions = probe.where.within(start, end, token, read)
        if not probe.rule.is_plain:
            slots = range(probe.slot, probe.slot + probe.rule.columns)
            numbers = scores.numbers(index, slots, positions)
            state, made = probe.rule.follow(progress.state, numbers)
            progress, values = progress._replace(state=state), made.tolist()
        else:
            if (
                isinstance(positions, range)
                and len(positions) > _FEW
                and condition.pool == "none"
                and not progress.run
            ):
                # Of a prompt's thousands of tokens hardly one meets a condition.
                low, high = bounds_of(condition)
                positions = positions[scores.num_within(index, probe.slot, positions, low, high) :]
            values = scores.at(index, probe.slot, positions)
        probe_progress[probe_index], met = follow(condition, progress, values)
        if met is not None and probe.version is not None:
            probe_progress[probe_index] = None
            switched.append(Firing(probe.name, positions[met.nth], probe.version))
        elif met is not None and (firing is None or positions[met.nth] < firing.position):
            firing = Firing(probe.name, positions[met.nth])
    switched.sort(key=lambda switch: switch.position)
    return ProbeProgress(max(reached, end), tuple(probe_progress)), firing, tuple(switched)


def _cut(output: Any, evaluation: _Evaluated, firing: Firing) -> bool:
    """Drop what was sampled for a request after a position's token; return whether any is left."""
    kept = max(firing.position + 1 - evaluation.known, 0)
    if not kept:
        return False
    index = output.req_id_to_index[evaluation.request.request_id]
    # The lists may be the model runner's own.
    output.sampled_token_ids = list(output.sampled_token_ids)
    output.sampled_token_ids[index] = output.sampled_token_ids[index][:kept]
    return True
