"""Executor of a job on a Ray cluster: a Ray Data pipeline of chunk numbers and outcomes.

Ray Data restarts an actor whose process has died and repeats its chunks; the coordinator and
`Worker` ensure that no row is stored twice.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from midstream.console import WHEN_QUIET
from midstream.errors import EngineError, MidstreamError
from midstream.lab.jobs.directory_lock import mark
from midstream.lab.jobs.engine import Engine
from midstream.lab.jobs.job import Job
from midstream.lab.jobs.local_executor import CapturedLine
from midstream.lab.jobs.ray.actor import CHUNK, OUTCOME, EngineActor, EngineSpec, chunk_numbers
from midstream.lab.jobs.ray.chunk_coordinator import ChunkCoordinator
from midstream.lab.jobs.ray.chunks import Outcome, unpack_error
from midstream.lab.jobs.ray.cluster import connected
from midstream.lab.jobs.ray.placement import EngineLayout, Placement
from midstream.lab.jobs.records import Failed, Record

_LOGGER = logging.getLogger(__name__)
# Seconds that one step waits for an outcome.
_STEP_SECONDS = 0.2
# Seconds that engines may take to write their last rows when a job ends early.
_CLOSE_SECONDS = 120.0
_JOIN_SECONDS = 5.0

ENGINES = {
    # An engine in its actor's own process ends with it and leaves no memory allocated on a GPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables of engines, unless already set."""
# Ray assigns cores; vLLM would bind all engines of a machine to the same ones.
ON_CPUS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class RayExecutor:
    """Sends lines to engines in chunks."""

    def __init__(
        self, job: Job, spread: Placement, lines: int | None, start: Callable[[Job], Engine]
    ) -> None:
        """Start the pipeline for this many lines, if known; wait until the first engine has
        started.
        """
        self.stored = 0
        self._partial: list[tuple[str, Record]] = []
        # Number of lines of each unfinished chunk.
        self._sizes: dict[int, int] = {}
        self._chunks = 0
        # Outcomes, then the exception that ended Ray Data, or None at its end.
        self._updates: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
        self._ended = False
        self._is_closing = False
        self._has_raised = False
        self._thread: threading.Thread | None = None
        with ExitStack() as stack:
            ray = self._ray = stack.enter_context(connected(spread))
            machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            layout = spread.resolve(job, machines)
            self._chunk_lines = layout.chunk_lines(lines)
            chunks_each = layout.chunks_each(job, self._chunk_lines)
            self.window = layout.engines * chunks_each * self._chunk_lines
            self._coordinator = _on_this_machine(ray, ChunkCoordinator).remote(layout.engines)
            stack.callback(self._halt)
            quiet = {} if spread.log else WHEN_QUIET
            environment = ENGINES | quiet | ({} if layout.gpus else ON_CPUS)
            spec = EngineSpec(job, self._coordinator, start, mark(job), os.getcwd(), environment)
            stack.enter_context(_silent(spread))
            outcomes = _outcomes(ray, spec, layout, chunks_each)
            self._thread = threading.Thread(
                target=self._read, args=(outcomes,), name="midstream ray", daemon=True
            )
            self._thread.start()
            self._wait_for_start(self._thread)
            self._stack = stack.pop_all()

    def add(self, request: str, record: Record) -> None:
        self._partial.append((request, record))
        if len(self._partial) == self._chunk_lines:
            self._put()

    def step(self) -> Sequence[CapturedLine | Failed]:
        # The window is a whole number of chunks, so a partial chunk holds the last lines.
        self._put()
        try:
            return self._handle(self._updates.get(timeout=_STEP_SECONDS))
        except queue.Empty:
            return ()

    def close(self) -> Sequence[CapturedLine | Failed]:
        outcomes: list[CapturedLine | Failed] = []
        problem: MidstreamError | None = None
        self._is_closing = True
        with self._stack:
            self._get(self._coordinator.end.remote(halt=bool(self._sizes or self._partial)))
            while not self._ended:
                try:
                    outcomes += self._handle(self._updates.get(timeout=_CLOSE_SECONDS))
                except queue.Empty:
                    problem = EngineError(f"engines did not end within {_CLOSE_SECONDS:g} seconds")
                    break
                except MidstreamError as error:
                    # More updates may follow. Only the first error of the job is raised.
                    problem = problem or (None if self._has_raised else error)
        if problem is not None:
            raise problem
        return outcomes

    # ------------------------------------------------------------

    def _put(self) -> None:
        if self._partial:
            self._get(self._coordinator.put.remote(tuple(self._partial)))
            self._sizes[self._chunks] = len(self._partial)
            self._chunks += 1
            self._partial = []

    def _handle(self, update: Outcome | BaseException | None) -> Sequence[CapturedLine | Failed]:
        if update is None:
            self._ended = True
            if self._sizes and not self._is_closing:
                raise EngineError(f"engines ended with {len(self._sizes)} unfinished chunks")
            return ()
        if isinstance(update, BaseException):
            self._ended = True
            raise EngineError(f"Ray: {type(update).__name__}: {update}") from update
        if self._sizes.pop(update.chunk, None) is None:
            return ()  # reported before and then repeated by Ray
        finished: list[CapturedLine | Failed] = [*update.captured, *update.failed]
        self.stored += len(update.captured)
        self._coordinator.done.remote(update.chunk, len(update.captured))
        if update.error is not None:
            self._has_raised = True
            raise update.error
        return finished

    def _read(self, outcomes: Iterator[dict[str, Any]]) -> None:
        """Move Ray Data's results into the queue; runs in a thread."""
        try:
            for batch in outcomes:
                for text in batch[OUTCOME]:
                    self._updates.put(Outcome.from_json(text))
        except BaseException as error:
            _LOGGER.debug("Ray Data ended", exc_info=True)
            self._updates.put(error)
        else:
            self._updates.put(None)

    def _wait_for_start(self, thread: threading.Thread) -> None:
        while True:
            words = self._get(self._coordinator.started.remote(1.0))
            if words:
                raise unpack_error(words)
            if words is not None:
                return
            if not thread.is_alive():
                self._handle(self._updates.get())
                raise EngineError("Ray ended before an engine had started")

    def _halt(self) -> None:
        """End the thread before Ray shuts down, and remove the actor from a shared cluster."""
        self._get(self._coordinator.end.remote(halt=True))
        if self._thread is not None:
            self._thread.join(timeout=_JOIN_SECONDS)
        self._ray.kill(self._coordinator)

    def _get(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise EngineError(f"Ray: {type(error).__name__}: {error}") from error


def _on_this_machine(ray: Any, kind: type) -> Any:
    """Return an actor class whose actors run on this process's machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(kind).options(num_cpus=0, max_concurrency=10_000, scheduling_strategy=here)


def _outcomes(
    ray: Any, spec: EngineSpec, layout: EngineLayout, chunks_each: int
) -> Iterator[dict[str, Any]]:
    """Run the pipeline lazily and yield batches of outcomes."""
    numbers = ray.data.from_items([{CHUNK: -1}]).map_batches(
        chunk_numbers,
        fn_kwargs={"coordinator": spec.coordinator},
        batch_size=None,
        num_cpus=0,
    )
    outcomes = numbers.map_batches(
        EngineActor,
        fn_constructor_args=(spec,),
        batch_size=None,
        **actor_options(ray, layout, chunks_each),
    )
    context = outcomes.context
    # Each number is its own block, so that it is sent to an actor at once and not with others.
    context.target_max_block_size = context.target_min_block_size = 1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return iter(outcomes.iter_batches(batch_size=None, prefetch_batches=0))


def actor_options(ray: Any, layout: EngineLayout, calls: int) -> dict[str, Any]:
    """Return `map_batches` arguments for a pool of engines with `calls` concurrent calls each."""
    import inspect

    pool = ray.data.ActorPoolStrategy
    sizes = {"size": layout.engines, "max_tasks_in_flight_per_actor": calls}
    options: dict[str, Any] = {"num_cpus": layout.cpus}
    if layout.gpus:
        options["num_gpus"] = layout.gpus
    if "max_concurrent_calls_per_actor" in inspect.signature(pool).parameters:
        sizes["max_concurrent_calls_per_actor"] = calls
    else:
        options["max_concurrency"] = calls
    return {**options, "compute": pool(**sizes)}


@contextmanager
def _silent(spread: Placement) -> Iterator[None]:
    """Silence Ray Data's log messages below ERROR, unless `spread.log` is set."""
    logger = logging.getLogger("ray.data")
    before = logger.level
    logger.setLevel(before if spread.log else logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
