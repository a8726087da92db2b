"""Prometheus metrics, in vLLM's registry; a scrape of `/metrics` fetches the engine's counts."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from midstream.drift import DriftMonitor
from midstream.runtime.protocol.worker_info import place_of
from midstream.steering.guards import ActiveGuard

# Label: a worker's place, as in the problems of receipts.
_WORKER = ("worker",)
_GUARD = ("guard", "version")
# Minimum interval between two queries of the engine: /metrics needs no key.
_EVERY_SECONDS = 1.0

# (name, help, labels)
COUNTERS = (
    ("completions", "Completions with a plan, by the status of their receipt.", ("status",)),
    ("aborted", "Calls with a plan that ended without a receipt.", ()),
    ("receipt_mismatches", "Completions whose receipt has the status error.", ()),
    ("captured_rows", "Captured vectors.", ()),
    ("captured_bytes", "Bytes of captured vectors, as encoded on the device.", ()),
    ("dropped_rows", "Captured vectors dropped because the arena was full.", ()),
    ("edits_applied", "Edits applied on the device, counted per token and site.", ()),
    ("edits_cached", "Edits of tokens served from the prefix cache.", ()),
    ("probe_scores", "Probe scores.", ()),
    ("sink_failures", "Completions whose rows a sink did not store, or not completely.", ()),
    ("sweeps", "Ended sweeps, by how they ended.", ("status",)),
    ("sweep_cells", "Cells of sweeps whose value was sent.", ()),
    ("refusals", "Rejected HTTP requests to midstream.", ("status",)),
    ("steps", "Forward passes of a worker.", _WORKER),
    ("active_steps", "Forward passes with at least one token that a plan covers.", _WORKER),
    ("planner_seconds", "Time that the planner took to prepare steps.", _WORKER),
    ("spills", "Arena segments spilled to disk because memory was full.", _WORKER),
    ("guard_requests", "Completions, by whether a guard scored them.", (*_GUARD, "scored")),
    ("guard_actions", "Completions on which a guard acted, by action.", (*_GUARD, "action")),
    ("guard_failures", "Completions that a guard's second stage could not read.", _GUARD),
    ("guard_events_dropped", "Events of guards that a sink or a webhook did not get.", ()),
)  # fmt: skip
GAUGES = (
    ("requests_running", "Unfinished calls with a plan, including waiting ones.", ()),
    ("requests_waiting", "Calls with a plan that wait for capacity.", ()),
    ("arena_bytes", "Shared memory allocated by the arena.", _WORKER),
    ("arena_free_bytes", "Allocated arena memory that is unused.", _WORKER),
    ("arena_disk_bytes", "Bytes of spilled arena segments.", _WORKER),
    ("arena_budget_bytes", "Memory limit of the arena.", _WORKER),
    ("arena_leases", "Results whose rows a reader still uses in the arena.", _WORKER),
    ("ring_rows", "Capacity of the staging ring on the device, in rows.", _WORKER),
    ("ring_rows_last", "Ring rows used by the last active step.", _WORKER),
    ("ring_rows_most", "Most ring rows used by one step.", _WORKER),
    ("sink_unwritten_bytes", "Bytes delivered to a sink and not yet stored durably.", ("sink",)),
    ("held_captures", "Captures cached for clients to fetch.", ()),
    ("held_bytes", "Bytes of cached captures.", ()),
    ("vectors", "Registered names of vectors.", ()),
    ("workers_age_seconds", "Age of the workers' values; 0 if they answered this query.", ()),
    ("steering_epoch", "Number of changes of server-wide steering.", ()),
    (
        "guard_drift_psi",
        "Population stability index of a guard's latest scores against its training.",
        _GUARD,
    ),
)
# Gauges that each API server process has for itself; the others are the same in all.
_OF_PROCESS = (
    "requests_running", "requests_waiting", "sink_unwritten_bytes", "held_captures", "held_bytes",
)  # fmt: skip
HISTOGRAMS = (
    ("waiting_seconds", "Time that calls with a plan waited for capacity, if they did.", ()),
    ("guard_score", "Pooled score of a completion nearest to a guard's threshold.", _GUARD),
    ("guard_seconds", "Time by which the guards delayed the end of a completion.", ()),
)
_BUCKETS = {
    "waiting_seconds": (0.01, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300),
    "guard_score": (
        -100, -50, -20, -10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 3, 4, 5, 7, 10, 20, 50, 100,
    ),
    "guard_seconds": (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
}  # fmt: skip


class Metrics:
    """Metrics of one registry."""

    def __init__(self, registry: Any = None) -> None:
        """Register the metrics, by default in the process-wide registry that vLLM uses."""
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram

        registry = REGISTRY if registry is None else registry
        self._counters = {
            name: Counter(f"midstream:{name}", text, labels, registry=registry)
            for name, text, labels in COUNTERS
        }
        self._gauges = {
            name: Gauge(
                f"midstream:{name}", text, labels, registry=registry,
                multiprocess_mode="livesum" if name in _OF_PROCESS else "mostrecent",
            )
            for name, text, labels in GAUGES
        }  # fmt: skip
        self._histograms = {
            name: Histogram(
                f"midstream:{name}", text, labels, registry=registry, buckets=_BUCKETS[name]
            )
            for name, text, labels in HISTOGRAMS
        }
        self._totals: dict[tuple[str, ...], float] = {}
        self.drift = DriftMonitor()
        self._drifts: set[tuple[str, int]] = set()  # guards and versions with an index
        self._lock = asyncio.Lock()
        self._refreshed_at = -_EVERY_SECONDS

    def count_refusal(self, status: int) -> None:
        self._counters["refusals"].labels(str(status)).inc()

    def count_sweep(self, status: str, cells: int) -> None:
        """Count an ended sweep: `ok`, `error`, or `aborted` because its client disconnected."""
        self._counters["sweeps"].labels(status).inc()
        self._counters["sweep_cells"].inc(cells)

    def observe_wait(self, seconds: float) -> None:
        self._histograms["waiting_seconds"].observe(seconds)

    def count_guarded(self, guard: ActiveGuard, scored: bool) -> None:
        labels = guard.name, str(guard.version), str(scored).lower()
        self._counters["guard_requests"].labels(*labels).inc()

    def count_action(self, guard: ActiveGuard, action: str) -> None:
        self._counters["guard_actions"].labels(guard.name, str(guard.version), action).inc()

    def count_failure(self, guard: ActiveGuard) -> None:
        self._counters["guard_failures"].labels(guard.name, str(guard.version)).inc()

    def observe_score(self, guard: ActiveGuard, score: float) -> None:
        self._histograms["guard_score"].labels(guard.name, str(guard.version)).observe(score)
        if guard.definition.training is not None:
            self.drift.add(guard.name, guard.version, guard.definition.training, score)

    def observe_guards(self, seconds: float) -> None:
        self._histograms["guard_seconds"].observe(seconds)

    async def refresh(
        self, state: Callable[[], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Update all metrics by the server's status, unless they were within the last second."""
        async with self._lock:
            if clock() - self._refreshed_at >= _EVERY_SECONDS:
                self.update(await state())
                self._refreshed_at = clock()

    def update(self, state: Mapping[str, Any]) -> None:
        """Set all metrics from a response of `GET /v1/midstream/status`."""
        totals = state["totals"]
        for status, count in totals["completions"].items():
            self._total("completions", count, status)
        self._total("receipt_mismatches", totals["completions"].get("error", 0))
        for name, key in (("aborted", "aborted"), ("captured_rows", "rows"),
                          ("captured_bytes", "row_bytes"), ("dropped_rows", "dropped"),
                          ("edits_applied", "edits"), ("edits_cached", "cached_edits"),
                          ("probe_scores", "scores"),
                          ("sink_failures", "sink_failures")):  # fmt: skip
            self._total(name, totals[key])
        self._set("requests_running", state["requests"])
        self._set("requests_waiting", state["waiting"])
        for sink, unwritten in state["sinks"].items():
            self._set("sink_unwritten_bytes", unwritten, sink)
        self._set("held_captures", state["held"]["captures"])
        self._set("held_bytes", state["held"]["bytes"])
        self._set("vectors", state["vectors"])
        self._set("steering_epoch", state["steering"]["epoch"])
        indices = self.drift.indices()
        for guard, version in self._drifts - indices.keys():
            self._set("guard_drift_psi", math.nan, guard, str(version))
        for (guard, version), index in indices.items():
            self._set("guard_drift_psi", index, guard, str(version))
        self._drifts = set(indices)
        lost = sum(sink["dropped"] + sink["dead_letters"] for sink in state["events"].values())
        self._total("guard_events_dropped", lost)
        if state["workers_age_seconds"] is not None:
            self._set("workers_age_seconds", state["workers_age_seconds"])
        for worker in state["workers"]:
            place = place_of(worker["replica"], worker["stage"], worker["tensor_rank"])
            self._update_worker(worker, place, is_counting=state["process"]["number"] == 0)

    def _update_worker(self, worker: Mapping[str, Any], place: str, is_counting: bool) -> None:
        arena, steps = worker["arena"], worker["steps"]
        if is_counting:  # the counters of all processes are added
            self._total("steps", steps["steps"], place)
            self._total("active_steps", steps["active"], place)
            self._total("planner_seconds", steps["planner_ns"] / 1e9, place)
            self._total("spills", arena["spills"], place)
        self._set("arena_bytes", arena["memory_bytes"], place)
        for name in ("free_bytes", "disk_bytes", "budget_bytes", "leases"):
            self._set(f"arena_{name}", arena[name], place)
        self._set("ring_rows", worker["ring_rows"], place)
        self._set("ring_rows_last", steps["ring_last"], place)
        self._set("ring_rows_most", steps["ring_most"], place)

    def _total(self, name: str, total: float, *labels: str) -> None:
        """Increase a counter to a total that was counted elsewhere."""
        key = (name, *labels)
        more = total - self._totals.get(key, 0.0)
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(more)
        self._totals[key] = total

    def _set(self, name: str, value: float, *labels: str) -> None:
        gauge = self._gauges[name]
        (gauge.labels(*labels) if labels else gauge).set(value)


@functools.cache
def process_metrics() -> Metrics:
    """Return the process-wide metrics; a Prometheus registry accepts each name once."""
    return Metrics()
