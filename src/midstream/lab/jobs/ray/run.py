"""Dataset capture with engines on a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable

from midstream.lab.jobs.engine import Engine, start_vllm
from midstream.lab.jobs.job import Job
from midstream.lab.jobs.ray.cluster import import_ray
from midstream.lab.jobs.ray.executor import RayExecutor
from midstream.lab.jobs.ray.placement import Placement
from midstream.lab.jobs.run import CaptureRun, Summary, Watch


class RayCaptureRun(CaptureRun):
    """A `CaptureRun` on a Ray cluster, with the same data, request ids, errors and store.

    The store equals that of a single engine except for the order of requests and their ids in the
    engine (`request_id`).
    """

    engines = "engines on Ray"

    def __init__(self, job: Job, spread: Placement | None = None) -> None:
        """Check everything that can be checked without a cluster, and lock the store.

        Args:
            spread: number of engines and their resources; None: the defaults of `Placement`.
        """
        import_ray()
        super().__init__(job)
        self._spread = spread or Placement()

    def work(
        self,
        start: Callable[[Job], Engine] = start_vllm,
        watch: Watch | None = None,
        stop: threading.Event | None = None,
    ) -> Summary:
        """Capture until the data ends. However the run ends, finished lines are in the store.

        A line that repeatedly ends its engine is reported as failed.

        Args:
            start: starts an engine in a process of the cluster; must be importable there.
            watch, stop: see `CaptureRun.work`.
        """
        lines = self.counts.total
        if lines is not None:
            lines = max(0, lines - self.stored_before)
        return self.work_on(lambda job: RayExecutor(job, self._spread, lines, start), watch, stop)
