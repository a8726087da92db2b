"""Metrics say what the engine has counted, and ask it only when they are asked."""

import asyncio
import copy
import math
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from midstream.drift import DriftMonitor, ScoreBins, Training
from midstream.server.metrics import COUNTERS, GAUGES, Metrics
from midstream.steering.guard_definition import GuardDefinition
from midstream.steering.guards import ActiveGuard

TOTALS = {
    "completions": {"ok": 5, "error": 2}, "aborted": 1, "rows": 40, "row_bytes": 4000, "dropped": 6,
    "edits": 24, "cached_edits": 8, "scores": 16, "sink_failures": 9,
}  # fmt: skip
ARENA = {
    "free_bytes": 100, "disk_bytes": 10, "budget_bytes": 5000, "leases": 2, "segments": 1,
    "spills": 3,
}  # fmt: skip
STEPS = {"active": 20, "planner_ns": 2_500_000_000, "ring_last": 7, "ring_most": 90}
STATE: dict[str, Any] = {
    "requests": 3, "waiting": 1, "vectors": 4, "workers_age_seconds": 1.5, "totals": TOTALS,
    "sinks": {"store": 70}, "held": {"captures": 2, "bytes": 300},
    "events": {"a": {"dropped": 0, "dead_letters": 0}, "b": {"dropped": 5, "dead_letters": 7}},
    "steering": {"epoch": 11, "digest": "d"}, "process": {"number": 0, "count": 1},
    "workers": [
        {"replica": 3, "stage": stage, "tensor_rank": 0, "ring_rows": 640,
         "arena": {"memory_bytes": 1000 + stage, **ARENA}, "steps": {"steps": 50 + stage, **STEPS}}
        for stage in range(2)
    ],
}  # fmt: skip


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"midstream:{name}", labels)


def test_ended_sweeps_and_refusals_are_counted(metrics, registry):
    for status in (400, 400, 413):
        metrics.count_refusal(status)
    assert value(registry, "refusals_total", status="400") == 2
    assert value(registry, "refusals_total", status="413") == 1
    metrics.count_sweep("ok", 16)
    metrics.count_sweep("aborted", 3)
    metrics.count_sweep("ok", 4)
    assert value(registry, "sweeps_total", status="ok") == 2
    assert value(registry, "sweeps_total", status="aborted") == 1
    assert value(registry, "sweep_cells_total") == 23


def test_every_metric_is_told_by_a_status(metrics, registry):
    metrics.update(STATE)
    metrics.count_refusal(429)
    metrics.count_sweep("ok", 16)
    metrics.drift = DriftMonitor(least=1)
    definition = GuardDefinition(None, None, training=Training(ScoreBins((0.0,), (1, 1))))
    guard = ActiveGuard("toxic", 3, definition, None, None)
    metrics.count_guarded(guard, True)
    metrics.count_action(guard, "flag")
    metrics.count_failure(guard)
    metrics.observe_score(guard, 2.5)
    metrics.update(STATE)
    labels = {"guard": "toxic", "version": "3"}
    assert value(registry, "guard_requests_total", scored="true", **labels) == 1
    assert value(registry, "guard_actions_total", action="flag", **labels) == 1
    assert value(registry, "guard_failures_total", **labels) == 1
    assert value(registry, "guard_score_bucket", le="3.0", **labels) == 1
    found = {
        sample.name.removeprefix("midstream:")
        for family in registry.collect()
        for sample in family.samples
    }
    assert {f"{name}_total" for name, _, _ in COUNTERS} <= found
    assert {name for name, _, _ in GAUGES} <= found


def test_counters_and_gauges_are_what_the_status_says(metrics, registry):
    metrics.update(STATE)
    assert value(registry, "completions_total", status="ok") == 5
    assert value(registry, "receipt_mismatches_total") == 2
    assert value(registry, "captured_bytes_total") == 4000
    assert value(registry, "planner_seconds_total", worker="3.1.0") == 2.5
    assert value(registry, "arena_bytes", worker="3.1.0") == 1001
    assert value(registry, "steps_total", worker="3.0.0") == 50
    assert value(registry, "sink_unwritten_bytes", sink="store") == 70
    assert value(registry, "requests_running") == 3
    assert value(registry, "held_bytes") == 300
    assert value(registry, "guard_events_dropped_total") == 12


def test_of_several_processes_one_counts_the_steps_of_the_engine(metrics, registry):
    metrics.update({**STATE, "process": {"number": 1, "count": 2}})
    assert value(registry, "completions_total", status="ok") == 5
    assert value(registry, "arena_bytes", worker="3.1.0") == 1001
    assert value(registry, "steps_total", worker="3.0.0") in (None, 0)


def test_a_counter_grows_by_what_was_counted_since(metrics, registry):
    metrics.update(STATE)
    metrics.update(STATE)
    assert value(registry, "captured_rows_total") == 40
    later = copy.deepcopy(STATE)
    later["totals"]["rows"] = 45
    later["totals"]["completions"]["partial"] = 1
    metrics.update(later)
    assert value(registry, "captured_rows_total") == 45
    assert value(registry, "completions_total", status="partial") == 1


def test_however_often_they_are_read_the_engine_is_asked_once_a_second(metrics):
    asked = []
    now = [100.0]

    async def state() -> dict[str, Any]:
        asked.append(now[0])
        await asyncio.sleep(0)
        return STATE

    async def read() -> None:
        await metrics.refresh(state, lambda: now[0])

    async def main() -> None:
        await asyncio.gather(*(read() for _ in range(5)))
        now[0] += 0.9
        await read()
        now[0] += 0.2
        await asyncio.gather(*(read() for _ in range(5)))

    asyncio.run(main())
    assert asked == [100.0, pytest.approx(101.1)]


def test_the_drift_of_a_guard_is_that_of_its_scores_and_none_once_they_are_old(metrics, registry):
    now = 0.0
    metrics.drift = DriftMonitor(least=3, clock=lambda: now)
    training = Training(ScoreBins((0.0,), (30, 10)), seconds=60.0)
    drifting = ActiveGuard("g", 2, GuardDefinition(None, None, training=training), None, None)
    for score in (1.0, 2.0, -1.0):
        metrics.observe_score(drifting, score)
        metrics.observe_score(ActiveGuard("plain", 1, GuardDefinition(None, None), None, None), 5.0)
    metrics.update(STATE)
    # Shares with half a score more in each bin: 30.5 and 10.5 of 41; 1.5 and 2.5 of 4.
    a, e = 1.5 / 4, 30.5 / 41
    wanted = (a - e) * math.log(a / e) + (e - a) * math.log((1 - a) / (1 - e))
    assert value(registry, "guard_drift_psi", guard="g", version="2") == pytest.approx(wanted)
    assert value(registry, "guard_drift_psi", guard="plain", version="1") is None
    now = 100.0
    metrics.update(STATE)
    assert math.isnan(value(registry, "guard_drift_psi", guard="g", version="2"))
