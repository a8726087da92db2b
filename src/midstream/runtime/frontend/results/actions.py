"""Acts of a completion's probes, from the scores that the workers returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from midstream.plan import ResolvedPlan, ResolvedProbe, Stop, Switch
from midstream.plan.control.act import Progress, follow
from midstream.plan.control.controller import Controller
from midstream.plan.scores.rule import NO_TOKENS
from midstream.results.probe_scores import Probes
from midstream.results.receipt import Action
from midstream.runtime.frontend.results.held_plans import HeldPlan
from midstream.runtime.protocol.acting_probes import probe_source
from midstream.runtime.protocol.control import control_source
from midstream.runtime.protocol.rank_parts import probe_numbers
from midstream.runtime.protocol.runs import Floats, Ints
from midstream.runtime.protocol.worker_info import WorkerInfo

# The positions and scores, float32 [positions, slots], that a worker sent.
Sent = Sequence[tuple[WorkerInfo, Ints, Floats]]


def probe_that_stopped(plan: ResolvedPlan, completion: Any) -> ResolvedProbe | None:
    if completion.finish_reason != "stop" or not isinstance(completion.stop_reason, str):
        return None
    for probe in plan.probes:
        if isinstance(probe.act, Stop) and completion.stop_reason == probe_source(probe.name):
            return probe
    return None


def tokens_of_rows(
    output: Any,
    completion: Any,
    plan: ResolvedPlan,
    sent: Sent = (),
    controller: Controller | None = None,
) -> list[int]:
    """Return the token id of each computed row, 0 for a prompt of embeddings: the last token has
    one only if a probe or controller ended there, and a stop in the prompt ends them.
    """
    tokens = [*(output.prompt_token_ids or [0] * plan.prompt_len), *completion.token_ids]
    probe = probe_that_stopped(plan, completion)
    ending = completion.finish_reason, completion.stop_reason
    if controller is not None and ending == ("stop", control_source(controller.name)):
        read = [probe for probe in plan.probes if probe.name and probe.source >= 0]
        runs = [positions for probe in read for positions, _ in probe_numbers(probe, sent)]
        last = max((int(positions[-1]) for positions in runs if positions.size), default=-1)
        return tokens if completion.token_ids else tokens[: last + 1]
    if probe is None:
        return tokens[: max(0, len(tokens) - 1)]
    if completion.token_ids:
        return tokens
    blocks = probe_numbers(probe, sent)
    if not blocks:
        return tokens
    order = np.argsort(np.concatenate([positions for positions, _ in blocks]), kind="stable")
    positions = np.concatenate([positions for positions, _ in blocks])[order]
    numbers = np.concatenate([values for _, values in blocks])[order]
    chosen = np.isin(positions, probe.where.within(0, len(tokens), tokens.__getitem__))
    positions, numbers = positions[chosen], numbers[chosen]
    _, scores = probe.act_rule.follow(NO_TOKENS, numbers)
    assert probe.act is not None
    _, met = follow(probe.act, Progress(), scores.tolist())
    if met is not None:
        return tokens[: int(positions[met.nth]) + 1]
    return tokens[: int(positions[-1]) + 1] if positions.size else tokens


def actions_of(
    plan: ResolvedPlan,
    completion: Any,
    num_rows: int,
    probes: Probes | None,
    held: Sequence[HeldPlan],
) -> tuple[Action, ...]:
    stopped = probe_that_stopped(plan, completion)
    starts = {version.later.source: version.start for version in held if version.later is not None}
    actions = []
    for probe in plan.probes:
        if probe.act is None or probes is None:
            continue
        if isinstance(probe.act, Stop) and probe is not stopped:
            continue
        start = starts.get(probe_source(probe.name))
        if isinstance(probe.act, Switch) and start is None:
            continue
        positions = probes.positions_of(probe.name).tolist()
        every, output = probes[probe.name], probe.act_rule.output
        scores = (every if output is None else every[:, output]).tolist()
        _, met = follow(probe.act, Progress(), scores)
        if probe is stopped and positions and (met is None or positions[met.nth] != num_rows - 1):
            # Scores that were computed again, after a preemption, may differ in the last bits.
            actions.append(Action(probe.name, probe.act.word, num_rows - 1, scores[-1]))
        elif isinstance(probe.act, Switch) and start is not None:
            before = [place for place, position in enumerate(positions) if position < start]
            index, score = (None, 0.0) if met is None else met
            if before and (index is None or index > before[-1]):
                index, score = before[-1], scores[before[-1]]
            if index is not None:
                actions.append(Action(probe.name, probe.act.word, positions[index], score))
        elif met is not None:
            actions.append(Action(probe.name, probe.act.word, positions[met.nth], met.pooled))
    return tuple(actions)
