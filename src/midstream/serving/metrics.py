"""Prometheus metrics, in the registry that vLLM's own are in, so that `/metrics` has both.

Nothing is counted here while requests run: when `/metrics` is asked for, the engine is asked what
it has counted.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

from midstream.runtime.workers import place_of

# A worker's place, as in receipts' problems.
_WORKER = ("worker",)
# How often the engine is asked at most: whoever reaches /metrics needs no key.
_EVERY_SECONDS = 1.0

# (name, help, labels)
COUNTERS = (
    ("completions", "Completions that asked for something, by the status of their receipt.",
     ("status",)),
    ("aborted", "Calls that asked for something and ended without a receipt.", ()),
    ("receipt_mismatches", "Completions whose receipt shows that not all was done as asked.", ()),
    ("captured_rows", "Captured vectors.", ()),
    ("captured_bytes", "Bytes of captured vectors, as they left the device.", ()),
    ("dropped_rows", "Captured vectors that found no room in the arena.", ()),
    ("edits_applied", "Edits that the device carried out, one for each token and place.", ()),
    ("edits_cached", "Edits of tokens that the prefix cache had.", ()),
    ("probe_scores", "Scores of probes.", ()),
    ("sink_failures", "Completions whose rows a sink did not keep, or not all of them.", ()),
    ("refusals", "HTTP requests to midstream that were refused.", ("status",)),
    ("steps", "Forwards of a worker.", _WORKER),
    ("active_steps", "Forwards in which some token asked for something.", _WORKER),
    ("planner_seconds", "Time in which the planner laid out the steps.", _WORKER),
    ("spills", "Segments of the arena that went to disk for want of memory.", _WORKER),
)  # fmt: skip
GAUGES = (
    ("requests_running", "Calls under way that ask for something, with those that wait.", ()),
    ("requests_waiting", "Of these, those that wait for room.", ()),
    ("arena_bytes", "Shared memory that the arena has taken.", _WORKER),
    ("arena_free_bytes", "Of that, what nobody uses now.", _WORKER),
    ("arena_disk_bytes", "Spilled segments.", _WORKER),
    ("arena_budget_bytes", "How much memory the arena may take.", _WORKER),
    ("arena_leases", "Results whose rows a reader still holds in the arena.", _WORKER),
    ("ring_rows", "Rows that the staging ring on the device holds.", _WORKER),
    ("ring_rows_last", "Rows of it that the last active step took.", _WORKER),
    ("ring_rows_most", "The most rows of it that one step took.", _WORKER),
    ("sink_unwritten_bytes", "Given to a sink and not there for good.", ("sink",)),
    ("held_captures", "Captures that are held for clients to fetch.", ()),
    ("held_bytes", "Bytes of these.", ()),
    ("vectors", "Names under which vectors are registered.", ()),
    ("steering_epoch", "How often server-wide steering was changed.", ()),
)


class Metrics:
    """The metrics of one registry."""

    def __init__(self, registry: Any = None) -> None:
        """Args:
        registry: a prometheus_client registry; None: that of the process, to which vLLM's belong,
            and of which its files have a copy where several processes share `/metrics`.
        """
        from prometheus_client import REGISTRY, Counter, Gauge

        registry = REGISTRY if registry is None else registry
        self._counters = {
            name: Counter(f"midstream:{name}", text, labels, registry=registry)
            for name, text, labels in COUNTERS
        }
        self._gauges = {
            name: Gauge(
                f"midstream:{name}", text, labels, registry=registry, multiprocess_mode="mostrecent"
            )
            for name, text, labels in GAUGES
        }
        self._known: dict[tuple[str, ...], float] = {}
        self._asking = asyncio.Lock()
        self._asked = -_EVERY_SECONDS

    def refused(self, status: int) -> None:
        """A request was refused."""
        self._counters["refusals"].labels(str(status)).inc()

    async def refresh(
        self, state: Callable[[], Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Brings all up to date, unless that was done a moment ago.

        Args:
            state: gives the engine's usage with the server's own, awaited; see `take`.
            clock: seconds.
        """
        async with self._asking:
            if clock() - self._asked >= _EVERY_SECONDS:
                self.take(await state())
                self._asked = clock()

    def take(self, state: Mapping[str, Any]) -> None:
        """Sets all that is told by a server's status.

        Args:
            state: what `GET /v1/midstream/status` answers.
        """
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
        for worker in state["workers"]:
            self._take_worker(worker, place_of(worker))

    def _take_worker(self, worker: Mapping[str, Any], place: str) -> None:
        arena, steps = worker["arena"], worker["steps"]
        self._total("steps", steps["steps"], place)
        self._total("active_steps", steps["active"], place)
        self._total("planner_seconds", steps["planner_ns"] / 1e9, place)
        self._total("spills", arena["spills"], place)
        self._set("arena_bytes", arena["memory_bytes"], place)
        self._set("arena_free_bytes", arena["free_bytes"], place)
        self._set("arena_disk_bytes", arena["disk_bytes"], place)
        self._set("arena_budget_bytes", arena["budget_bytes"], place)
        self._set("arena_leases", arena["leases"], place)
        self._set("ring_rows", worker["ring_rows"], place)
        self._set("ring_rows_last", steps["ring_last"], place)
        self._set("ring_rows_most", steps["ring_most"], place)

    def _total(self, name: str, total: float, *labels: str) -> None:
        """A counter's value, which others have counted."""
        key = (name, *labels)
        more = total - self._known.get(key, 0.0)
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(more)
        self._known[key] = total

    def _set(self, name: str, value: float, *labels: str) -> None:
        gauge = self._gauges[name]
        (gauge.labels(*labels) if labels else gauge).set(value)


@functools.cache
def of_process() -> Metrics:
    """Those of this process: a registry takes each name once."""
    return Metrics()
