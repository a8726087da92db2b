"""A view of a running engine: what is under way, waits, or is kept in memory. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from midstream.runtime.protocol.rpc import CheckIntegrity

if TYPE_CHECKING:
    from midstream.api.async_llm import AsyncLLM
    from midstream.api.llm import LLM
    from midstream.runtime.frontend.async_frontend import AsyncFrontEnd
    from midstream.runtime.frontend.base import BaseFrontEnd
    from midstream.runtime.frontend.engine_info import EngineInfo
    from midstream.runtime.frontend.sync_frontend import FrontEnd
    from midstream.runtime.worker.endpoint import WorkerEndpoint
    from midstream.sinks import Sink


class EngineView:
    """What can be read of any engine."""

    def __init__(self, front: BaseFrontEnd) -> None:
        self._base = front

    @property
    def info(self) -> EngineInfo:
        """What the workers report of themselves: model shape, taps, dtype, runner, capacity."""
        return self._base.info

    def in_flight(self) -> int:
        """Return the number of requests with a plan whose capacity is still reserved."""
        return len(self._base._needs)

    def waiting(self) -> int:
        """Return the number of requests that wait for capacity."""
        return self._base._admission.waiting

    def capacity_used(self, replica: int = 0) -> dict[str, int]:
        """Return how much of each kind of capacity the requests of one replica take."""
        return dict(self._base._admission._budgets[replica].used)

    @property
    def sink_names(self) -> tuple[str, ...]:
        """The names of the engine's sinks."""
        return tuple(self._base.sinks.names)

    def sink(self, name: str) -> Sink:
        """Return a sink by its name."""
        return self._base.sinks._sinks[name]


class LLMView(EngineView):
    """What can be read of a `midstream.LLM`."""

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm._front_end)
        self._llm = llm
        self._front: FrontEnd = llm._front_end

    def unreported(self) -> int:
        """Return the number of finished requests whose results are not on their outputs yet."""
        return len(self._front._finished)

    def streaming(self) -> int:
        """Return the number of requests whose rows go to sinks while they run."""
        return len(self._front._streamer)

    def check_integrity(self) -> None:
        """Check the invariants of every worker, between steps."""
        self._front.check_vectors([self._front._call(CheckIntegrity())])

    def arena_used(self) -> dict[str, int]:
        """Return what the first worker's arena holds, in bytes, and the number of leases on it."""
        return self._front._call(CheckIntegrity())[0].arena

    def worker_ids(self) -> list[int]:
        """Return the id of each worker's process."""
        return [worker.arena.pid for worker in self.info.workers]

    def leftovers(self) -> dict[str, int]:
        """Return the counts that should be 0 once an engine is idle, and are not."""
        self.check_integrity()
        front = self._front
        counts = {
            "requests under way": len(front._running),
            "requests in flight": self.in_flight(),
            "requests waiting": self.waiting(),
            "requests unreported": self.unreported(),
            "requests streaming": self.streaming(),
            "plans that can change": len(front.changes),
            "vectors in use": self._front._sent_vectors[0].in_use,
            **{f"capacity used: {name}": count for name, count in self.capacity_used().items()},
        }
        if self._llm.llm_engine.has_unfinished_requests():
            counts["unfinished requests"] = self._llm.llm_engine.get_num_unfinished_requests()
        endpoint = self._endpoint()
        if endpoint is not None:
            session = endpoint._session
            counts |= {
                "requests on the worker": len(session.requests),
                "programs in use": session._tables.in_use,
                "changed plans of no request": len(session.requests._early),
                "requests to be collected": len(session.requests._finished),
                "results to be read": len(endpoint._results._data),
            }
        return {name: count for name, count in counts.items() if count}

    def _endpoint(self) -> WorkerEndpoint | None:
        """The worker's end, where it is in this process."""
        executor = getattr(self._llm.llm_engine, "model_executor", None)
        driver: Any = getattr(executor, "driver_worker", None)
        endpoint: WorkerEndpoint | None = getattr(
            getattr(driver, "worker", None), "midstream_rpc", None
        )
        return endpoint


class AsyncLLMView(EngineView):
    """What can be read of a `midstream.AsyncLLM` that is ready."""

    def __init__(self, llm: AsyncLLM) -> None:
        super().__init__(llm._front)
        self._front: AsyncFrontEnd = llm._front

    async def check_integrity(self) -> None:
        """Wait for the work of calls that have ended, and check that nothing of them is left."""
        await self._front.check_integrity()


def inspect(llm: Any) -> Any:
    """Return the view of an engine: an `LLMView`, or an `AsyncLLMView`."""
    from midstream.api.async_llm import AsyncLLM
    from midstream.api.llm import LLM

    if isinstance(llm, LLM):
        return LLMView(llm)
    if isinstance(llm, AsyncLLM):
        return AsyncLLMView(llm)
    raise TypeError(f"expected a midstream.LLM or a midstream.AsyncLLM, got {type(llm).__name__}")
