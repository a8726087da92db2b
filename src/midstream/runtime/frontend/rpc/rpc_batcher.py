"""RPCs of an asynchronous engine, one at a time: the next has what is requested meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from midstream.errors import BusyError
from midstream.runtime.frontend.rpc.fetch import Exchange, collect, collect_partial, scores_by_uid
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.results import WorkerAnswers
from midstream.runtime.protocol.rpc import A, ReadScores, ReleaseRequests, RpcRequest
from midstream.runtime.protocol.scores import ScoreBlock, Span

T = TypeVar("T")
# Results that are collected together. 64 of nearly the size from which a worker leases memory are
# more than one answer may hold, and each that is left over takes two more calls.
_BATCH_REQUESTS = 32


class AsyncCall(Protocol):
    """Sends a request to all workers of an engine and returns their answers."""

    def __call__(self, request: RpcRequest[A], /) -> Awaitable[list[A]]: ...


@dataclass(eq=False)
class _Queue:
    _run: Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]
    _limit: int | None = None
    _waiting: dict[str, tuple[Any, asyncio.Future[Any]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, uid: str, argument: Any) -> asyncio.Future[Any]:
        future = asyncio.get_running_loop().create_future()
        self._waiting[uid] = (argument, future)
        return future

    def close(self) -> None:
        _end(future for _, future in self._waiting.values())
        self._waiting.clear()

    async def run(self) -> None:
        """Carry out one batch. An error of the operation is the result of each request in it."""
        batch = {uid: self._waiting.pop(uid) for uid in list(self._waiting)[: self._limit]}
        # A future is done already if its caller gave up.
        batch = {
            uid: (argument, future)
            for uid, (argument, future) in batch.items()
            if not future.done()
        }
        if not batch:
            return
        futures = [future for _, future in batch.values()]
        try:
            results = await self._run({uid: argument for uid, (argument, _) in batch.items()})
        except Exception as error:  # noqa: BLE001 - whatever it is, the requests learn it
            _end(futures, error)
            return
        except BaseException:
            _end(futures)
            raise
        for uid, (_, future) in batch.items():
            if not future.done():
                future.set_result(results.get(uid))


def _end(futures: Iterable[asyncio.Future[Any]], error: BaseException | None = None) -> None:
    closed = BusyError("the engine shut down before it had sent the request's results", 5)
    for future in futures:
        if not future.done():
            future.set_exception(error or closed)


class RpcBatcher:
    """Batches an engine's RPCs: one result of an operation and request at a time, on its loop."""

    def __init__(self, call: AsyncCall, workers: Sequence[RemoteWorker]) -> None:
        self._call = call
        self._workers = workers
        self._scores = _Queue(self._read_scores)
        self._partial = _Queue(lambda stops: self.carry_out(collect_partial(self._workers, stops)))
        self._releases = _Queue(self._release)
        self._collects = _Queue(
            lambda uids: self.carry_out(collect(self._workers, list(uids))), _BATCH_REQUESTS
        )
        self._task: asyncio.Task[None] | None = None

    async def peek(self, uid: str, span: Span) -> list[ScoreBlock]:
        """Return the scores of a running request at positions [start, stop), all computed."""
        blocks: list[ScoreBlock] = await self._request(self._scores, uid, span)
        return blocks

    async def collect_partial(self, uid: str, stops: Mapping[str, int]) -> WorkerAnswers:
        """Return rows of a running request below some positions; the workers forget them."""
        answers: WorkerAnswers = await self._request(self._partial, uid, stops)
        return answers

    async def collect(self, uid: str) -> WorkerAnswers:
        """Return all results of an ended request; the workers forget them."""
        answers: WorkerAnswers = await self._request(self._collects, uid, None)
        return answers

    async def release(self, uid: str) -> None:
        with suppress(BusyError):  # the workers end with the engine
            await self._request(self._releases, uid, None)

    def close(self) -> None:
        """Stop, and cancel all requests. May be called from any thread."""
        task = self._task
        if task is not None and not task.get_loop().is_closed():
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def _request(self, queue: _Queue, uid: str, argument: Any) -> Any:
        future = queue.add(uid, argument)
        if self._task is None:
            # It starts after all tasks that were woken by the outputs of this step.
            self._task = asyncio.create_task(self._work(), name="midstream RPC batcher")
        return await future

    async def _work(self) -> None:
        queues = (self._scores, self._partial, self._releases, self._collects)
        try:
            while any(queues):
                for queue in filter(None, queues):
                    await queue.run()
        finally:
            self._task = None
            # Requests are left only if this task was cancelled.
            for queue in queues:
                queue.close()

    async def _read_scores(self, spans: dict[str, Any]) -> dict[str, list[ScoreBlock]]:
        return scores_by_uid(self._workers, spans, await self._call(ReadScores(spans)))

    async def _release(self, uids: dict[str, Any]) -> dict[str, None]:
        await self._call(ReleaseRequests(list(uids)))
        return {}

    async def carry_out(self, exchange: Exchange[T]) -> T:
        try:
            request = next(exchange)
            while True:
                answers = await self._call(request)
                request = exchange.send(answers)
                # There is more to read: requests for scores need not wait for all of it.
                if self._scores:
                    await self._scores.run()
        except StopIteration as end:
            result: T = end.value
            return result
