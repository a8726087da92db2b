"""Faults of probes that act."""

from __future__ import annotations

from support.fault import Fault

CORE = "tests/unit/runtime/core/test_probe_stops.py"
ENGINE = "tests/engine/test_probe_stops.py"

ACTS: tuple[Fault, ...] = (
    Fault(
        "The token that was sampled with the score that stops its request is shown",
        "runtime/core/probe_stops.py",
        "    kept = max(firing.position + 1 - one.known, 0)\n",
        "    kept = max(firing.position + 2 - one.known, 0)\n",
        ENGINE + "::test_a_preempted_completion_stops_where_it_would_have",
    ),
    Fault(
        "Scores of draft tokens that were rejected stop a request",
        "runtime/core/probe_stops.py",
        "    stop = known + max(len(sampled) - 1, 0)\n",
        "    stop = known + 8\n",
        CORE,
    ),
    Fault(
        "A position that is computed again after a preemption counts twice for a condition",
        "runtime/core/probe_stops.py",
        "start, end = max(run.first, reached), min(",
        "start, end = run.first, min(",
        CORE,
    ),
    Fault(
        "A guard of the tier `generated` reads the prompt too",
        "steering/edit_forms.py",
        "    return probe if phase is None else probe.replace(phase=phase)\n",
        "    return probe\n",
        "tests/unit/server/test_steering_routes.py",
    ),
    Fault(
        "The score that stopped a completion is missing from its results",
        "runtime/frontend/results/actions.py",
        "    if completion.token_ids:\n        return tokens\n",
        "    if completion.token_ids:\n        return tokens[:-1]\n",
        ENGINE + "::test_captures_and_edits_reach_to_the_token_that_a_probe_stopped_at",
    ),
)
