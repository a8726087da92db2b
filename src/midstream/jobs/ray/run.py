"""A dataset capture whose engines are on a Ray cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable

from midstream.jobs.engine import Engine, start_vllm
from midstream.jobs.job import Job
from midstream.jobs.ray.cluster import import_ray
from midstream.jobs.ray.executor import RayExecutor
from midstream.jobs.ray.placement import Placement
from midstream.jobs.run import CaptureRun, Summary, Watch


class RayCaptureRun(CaptureRun):
    """As `midstream.jobs.Capturing`: the same data, ids, refusals and store. Besides the order
    in which requests are stored, and their numbers in the engine that had them (`request_id`), the
    store is the one that a single engine would have written.
    """

    engines = "engines on Ray"

    def __init__(self, job: Job, spread: Placement | None = None) -> None:
        """Checks all that can be known before there is a cluster.

        Args:
            job: what to do.
            spread: how many engines, and where; None: as `Placement()` says.

        Raises:
            UnsupportedError: Ray is not installed.
            MidstreamError: as `CaptureRun` says.
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
        """Captures until the data ends. Whatever ends it, what had come is in the store.

        A line with which engines end again and again is a line that failed.

        Args:
            start: makes an engine, in a process of the cluster: something that can be imported
            there. watch, stop: as of `CaptureRun.work`.

        Raises:
            SpecError: the cluster has no room for an engine; or there is no such model.
            EngineError: there is no cluster, or engines cannot start, or break again and again.
            StoreError: rows cannot be written; or this is not the data that is in the store; or a
                machine does not see the store's directory.
        """
        left = self.counts.total
        if left is not None:
            left = max(0, left - self.stored_before)
        return self.work_on(lambda job: RayExecutor(job, self._spread, left, start), watch, stop)
