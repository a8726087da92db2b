"""Engines on a Ray cluster as the executor of a job: a Ray Data pipeline of chunks and outcomes.

    lines -> desk -> numbers of chunks -> map_batches(EngineActor), a pool of actors -> outcomes

The job reads its data itself, in order, as it does without Ray: so the standard input is read, and
data whose lines have changed refused. What it has on its way is bounded (`window`), which is the
back-pressure; the rows go from the actors into the store, and only outcomes come back. Ray Data
restarts an actor whose process has ended, and runs again what that had; `desk` and `worker` see to
it that no row is there twice.
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
from midstream.jobs.directory_lock import mark
from midstream.jobs.engine import Engine
from midstream.jobs.job import Job
from midstream.jobs.local_executor import Captured
from midstream.jobs.ray.actor import CHUNK, OUTCOME, EngineActor, EngineSpec, offered
from midstream.jobs.ray.chunk_coordinator import ChunkCoordinator
from midstream.jobs.ray.chunks import Outcome, unpack_error
from midstream.jobs.ray.cluster import connected
from midstream.jobs.ray.placement import Layout, Placement
from midstream.jobs.records import Failed, Record

_LOGGER = logging.getLogger(__name__)
_TICK = 0.2  # seconds without news after which a job may look after itself
# How long engines may take to write what came, when a job ends before its data does.
_LAST = 120.0
_JOIN = 5.0

ENGINES = {
    # An engine in its actor's own process ends with it, and leaves nothing on a GPU.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of engines, where theirs does not say otherwise."""
# Cores are Ray's to give: vLLM would bind the engines of a machine to the same ones.
ON_CPUS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


class RayExecutor:
    """Sends lines to engines by chunks."""

    def __init__(
        self, job: Job, spread: Placement, lines: int | None, start: Callable[[Job], Engine]
    ) -> None:
        """Returns when the first engine has started.

        Args:
            job: its directory is taken.
            spread: how many engines, and where.
            lines: how many are left to do; None: nobody knows.
            start: makes an engine; it goes to the actors by name.

        Raises:
            SpecError: the cluster has no room for an engine, or there is no such model.
            UnsupportedError: Ray is not installed, or the model cannot be served.
            EngineError: there is no cluster, or an engine cannot start.
        """
        self.stored = 0
        self._partial: list[tuple[str, Record]] = []
        self._sizes: dict[int, int] = {}  # lines of the chunks on their way
        self._chunks = 0
        self._news: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()
        self._ended = False
        self._is_closing = False
        self._has_raised = False
        self._thread: threading.Thread | None = None
        with ExitStack() as stack:
            ray = self._ray = stack.enter_context(connected(spread))
            layout = spread.settle(job, _machines(ray))
            self._chunk_lines = layout.chunk_lines(lines)
            each = layout.chunks_each(job, self._chunk_lines)
            self.window = layout.engines * each * self._chunk_lines
            self._desk = _on_this_machine(ray, ChunkCoordinator).remote(layout.engines)
            stack.callback(self._halt)
            quiet = {} if spread.log else WHEN_QUIET
            environment = ENGINES | quiet | ({} if layout.gpus else ON_CPUS)
            duty = EngineSpec(job, self._desk, start, mark(job), os.getcwd(), environment)
            stack.enter_context(_silent(spread))
            outcomes = _outcomes(ray, duty, layout, each)
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

    def step(self) -> Sequence[Captured | Failed]:
        # The window is a number of whole chunks: what is left over are the last lines.
        self._put()
        try:
            return self._hear(self._news.get(timeout=_TICK))
        except queue.Empty:
            return ()

    def close(self) -> Sequence[Captured | Failed]:
        found: list[Captured | Failed] = []
        problem: MidstreamError | None = None
        self._is_closing = True
        with self._stack:
            self._ask(self._desk.end.remote(halt=bool(self._sizes or self._partial)))
            while not self._ended:
                try:
                    found += self._hear(self._news.get(timeout=_LAST))
                except queue.Empty:
                    problem = EngineError(f"engines did not end within {_LAST:g} seconds")
                    break
                except MidstreamError as error:
                    # Others may follow, and what is told already is not told again.
                    problem = problem or (None if self._has_raised else error)
        if problem is not None:
            raise problem
        return found

    # ------------------------------------------------------------

    def _put(self) -> None:
        if self._partial:
            self._ask(self._desk.put.remote(tuple(self._partial)))
            self._sizes[self._chunks] = len(self._partial)
            self._chunks += 1
            self._partial = []

    def _hear(self, news: Outcome | BaseException | None) -> Sequence[Captured | Failed]:
        if news is None:
            self._ended = True
            if self._sizes and not self._is_closing:
                raise EngineError(f"engines ended while {len(self._sizes)} chunks were to be done")
            return ()
        if isinstance(news, BaseException):
            self._ended = True
            raise EngineError(f"Ray: {type(news).__name__}: {news}") from news
        if self._sizes.pop(news.chunk, None) is None:
            return ()  # it was told of before, and was then done again
        ended: list[Captured | Failed] = [*news.captured, *news.failed]
        self.stored += len(news.captured)
        self._desk.done.remote(news.chunk, len(news.captured))
        if news.error is not None:
            self._has_raised = True
            raise news.error
        return ended

    def _read(self, outcomes: Iterator[dict[str, Any]]) -> None:
        """The thread that Ray Data's results come to."""
        try:
            for batch in outcomes:
                for text in batch[OUTCOME]:
                    self._news.put(Outcome.from_json(text))
        except BaseException as error:
            _LOGGER.debug("Ray Data ended", exc_info=True)
            self._news.put(error)
        else:
            self._news.put(None)

    def _wait_for_start(self, thread: threading.Thread) -> None:
        while True:
            words = self._ask(self._desk.started.remote(1.0))
            if words:
                raise unpack_error(words)
            if words is not None:
                return
            if not thread.is_alive():
                self._hear(self._news.get())
                raise EngineError("Ray ended before an engine had started")

    def _halt(self) -> None:
        """Whatever happens, the thread ends before Ray does; of a cluster that others use nothing
        is kept.
        """
        self._ask(self._desk.end.remote(halt=True))
        if self._thread is not None:
            self._thread.join(timeout=_JOIN)
        self._ray.kill(self._desk)

    def _ask(self, reference: Any) -> Any:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            raise EngineError(f"Ray: {type(error).__name__}: {error}") from error


def _machines(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _on_this_machine(ray: Any, kind: type) -> Any:
    """An actor class whose actors live and end with this process's machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(kind).options(num_cpus=0, max_concurrency=10_000, scheduling_strategy=here)


def _outcomes(ray: Any, duty: EngineSpec, layout: Layout, each: int) -> Iterator[dict[str, Any]]:
    """Runs the pipeline as it is iterated."""
    numbers = ray.data.from_items([{CHUNK: -1}]).map_batches(
        offered, fn_kwargs={"desk": duty.desk}, batch_size=None, num_cpus=0
    )
    outcomes = numbers.map_batches(
        EngineActor,
        fn_constructor_args=(duty,),
        batch_size=None,
        **actor_options(ray, layout, each),
    )
    context = outcomes.context
    # A number is a block of its own: it goes to an actor when it is there, and not with others.
    context.target_max_block_size = context.target_min_block_size = 1
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return iter(outcomes.iter_batches(batch_size=None, prefetch_batches=0))


def actor_options(ray: Any, layout: Layout, calls: int) -> dict[str, Any]:
    """Arguments of `map_batches` for a pool of engines, each of which has so many calls at once."""
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
    """Ray Data says nothing of what goes well."""
    logger = logging.getLogger("ray.data")
    before = logger.level
    logger.setLevel(before if spread.log else logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
