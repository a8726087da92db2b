"""Probes that end their request or switch its edits, and controllers: conditions are evaluated in
the order of the tokens, on the scores that arrive with each step.

The tokens that the step sampled are cut where a request ends, so no output has a token beyond the
one whose score met the condition. Other edits hold from the next position that is not scheduled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from midstream.runtime.core.controllers import controlled, decide
from midstream.runtime.core.ended_requests import add_end
from midstream.runtime.core.plan_versions import change_plans
from midstream.runtime.protocol.acting_probes import ActingProbe, stop_reason
from midstream.runtime.protocol.plan_version import PlanVersion
from midstream.runtime.protocol.request_payload import payload_of
from midstream.runtime.protocol.step_scores import ScoreRun, scores_of
from midstream.runtime.vllm.attributes import PROBE_PROGRESS
from midstream.spec.act import Progress, follow


@dataclass(frozen=True, slots=True)
class ProbeProgress:
    """How far the conditions of a request's probes are.

    Attributes:
        reached: number of positions that were evaluated. A position is evaluated once, also if it
            is computed again after a preemption.
        each: of each probe; None: it has switched the edits, which it does once.
    """

    reached: int
    each: tuple[Progress | None, ...]


@dataclass(frozen=True, slots=True)
class Firing:
    """A condition that was met, or a controller's answer.

    Attributes:
        name: name of the probe or the controller.
        position: position of the token whose score met it, or that has the last score.
        version: see `ActingProbe`.
        reason: the stop reason, if it ends the request; None: that of the probe.
        is_error: whether the request ends with an error.
    """

    name: str
    position: int
    version: PlanVersion | None = None
    reason: str | None = None
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class _Evaluated:
    """A request whose scores were evaluated before vLLM takes the step's tokens.

    Attributes:
        request: vLLM's Request.
        known: number of its tokens before the step.
        stop: position up to which its scores were evaluated.
        progress: how far its probes are then.
        firing: the condition that was met and ends it; None: none was.
        switched: those that were met and switch its edits, in the order of positions.
        runs: the scores.
        token: returns the token of a position.
        chosen: the version that its controller chose; None: what held before.
    """

    request: Any
    known: int
    stop: int
    progress: ProbeProgress
    firing: Firing | None
    switched: tuple[Firing, ...]
    runs: Sequence[ScoreRun]
    token: Callable[[int], int]
    chosen: PlanVersion | None = None


def update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduled: Any, output: Any
) -> Any:
    """Cut the tokens of requests whose probes stop them, call vLLM's
    `Scheduler.update_from_output`, end these requests, and switch the edits of others.
    """
    scores = scores_of(output)
    if scores is None:
        return original(scheduler, scheduled, output)
    found = []
    for name, runs in scores.values().items():
        request = scheduler.requests.get(name)
        if request is not None and not request.is_finished():
            found.append(_evaluate(request, runs, _sampled(output, name)))
    found = _controlled(scheduler, found)
    ended = []
    for one in found:
        if one.firing is not None and not _cut(output, one, one.firing):
            # Nothing is left: vLLM would look for a token where there are prompt logprobs.
            logprobs = output.prompt_logprobs_dict.get(one.request.request_id)
            ended += [
                (one, one.firing, logprobs) for _ in _finish(scheduler, one.request, one.firing)
            ]
    outputs = original(scheduler, scheduled, output)
    changes = []
    for one in found:
        if one.chosen is not None and not one.request.is_finished():
            changes.append((one.request, one.chosen))
        # vLLM drops the tokens of some steps that a preemption overtook. Draft tokens of these
        # were evaluated in vain.
        if one.request.num_tokens == one.known < one.stop:
            continue
        PROBE_PROGRESS.set(one.request, one.progress)
        if one.firing is not None and not one.request.is_finished():
            ended += [(one, one.firing, None) for _ in _finish(scheduler, one.request, one.firing)]
        if not one.request.is_finished():
            versions = [firing.version for firing in one.switched]
            changes += [(one.request, version) for version in versions if version is not None]
    change_plans(scheduler, changes)
    for one, firing, logprobs in ended:
        add_end(outputs, one.request, firing.reason or stop_reason(firing.name), logprobs)
    return outputs


def _controlled(scheduler: Any, found: Sequence[_Evaluated]) -> list[_Evaluated]:
    """Call the controllers of requests, and add what they answered."""
    controllers = {}
    for nth, one in enumerate(found):
        payload = payload_of(one.request.sampling_params)
        control = None if payload is None else payload.control
        if control is not None:
            mine = controlled(scheduler, one.request, control)
            # What vLLM may drop is computed again, and taken then.
            stop = one.known if is_overtaken(one.request) else one.stop
            if mine.take(one.runs, stop, one.token):
                controllers[nth] = mine
    out = list(found)
    for (nth, mine), decision in zip(
        controllers.items(), decide(list(controllers.values())), strict=True
    ):
        one, name = out[nth], mine.control.name
        at = mine.reached - 1
        if decision.reason is not None and (one.firing is None or at < one.firing.position):
            firing = Firing(name, at, reason=decision.reason, is_error=decision.is_error)
            out[nth] = replace(one, firing=firing)
        elif decision.version is not None:
            out[nth] = replace(one, chosen=decision.version)
    return out


def is_overtaken(request: Any) -> bool:
    """Return whether a preemption may have overtaken a step of a request: it is to be computed
    anew.
    """
    from vllm.v1.request import RequestStatus

    is_stale = getattr(request, "num_stale_output_tokens", 0) > 0
    return is_stale or request.status == RequestStatus.PREEMPTED


def _finish(scheduler: Any, request: Any, firing: Firing) -> Any:
    from vllm.v1.request import RequestStatus

    stopped, failed = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_ERROR
    status = failed if firing.is_error else stopped
    return scheduler.finish_requests([request.request_id], status)


def _sampled(output: Any, name: str) -> Sequence[int]:
    """Return the tokens that a step sampled for a request."""
    found: Sequence[Sequence[int]] = output.sampled_token_ids
    return found[output.req_id_to_index[name]] if found else ()


def _evaluate(request: Any, runs: list[ScoreRun], sampled: Sequence[int]) -> _Evaluated:
    payload = payload_of(request.sampling_params)
    probes = () if payload is None else payload.acts
    before = PROBE_PROGRESS.get(request)
    if before is None:
        before = ProbeProgress(0, (Progress(),) * len(probes))
    known = request.num_tokens
    # The last sampled token has no score yet; those before it are drafts, which were accepted.
    stop = known + max(len(sampled) - 1, 0)

    def token(position: int) -> int:
        found = request.all_token_ids[position] if position < known else sampled[position - known]
        return int(found)

    progress, firing, switched = advance(probes, before, runs, stop, token)
    return _Evaluated(request, known, stop, progress, firing, switched, runs, token)


def advance(
    probes: Sequence[ActingProbe],
    before: ProbeProgress,
    runs: Sequence[ScoreRun],
    stop: int,
    token: Callable[[int], int],
) -> tuple[ProbeProgress, Firing | None, tuple[Firing, ...]]:
    """Evaluate the conditions of a request's probes on the scores of a step.

    Args:
        probes: the probes.
        before: how far they were before the step.
        runs: the scores of the step, ascending.
        stop: position up to which the tokens of the rows are those of the request.
        token: returns the token of a position.

    Returns:
        (how far they are then; the condition of a probe that stops which is met at the earliest
        position, by the first of these probes, None: none is met; those of probes that switch, in
        the order of positions, and at one position of the probes).
    """
    each = list(before.each)
    reached = before.reached
    firing = None
    switched = []
    for run in runs:
        start, end = max(run.first, reached), min(run.first + run.values.shape[0], stop)
        for nth, probe in enumerate(probes):
            progress = each[nth]
            if progress is None:
                continue
            positions = probe.where.within(start, end, token)
            rows = [position - run.first for position in positions]
            scores = run.values[rows, probe.slot].tolist()
            each[nth], met = follow(probe.condition, progress, scores)
            if met is not None and probe.version is not None:
                each[nth] = None
                switched.append(Firing(probe.name, positions[met.nth], probe.version))
            elif met is not None and (firing is None or positions[met.nth] < firing.position):
                firing = Firing(probe.name, positions[met.nth])
        reached = max(reached, end)
        if firing is not None:
            break
    switched.sort(key=lambda one: one.position)
    return ProbeProgress(reached, tuple(each)), firing, tuple(switched)


def _cut(output: Any, one: _Evaluated, firing: Firing) -> bool:
    """Drop what was sampled for a request after the token of a position; return whether anything is
    left.
    """
    kept = max(firing.position + 1 - one.known, 0)
    if not kept:
        return False
    index = output.req_id_to_index[one.request.request_id]
    # The lists may be the model runner's own.
    output.sampled_token_ids = list(output.sampled_token_ids)
    output.sampled_token_ids[index] = output.sampled_token_ids[index][:kept]
    return True
