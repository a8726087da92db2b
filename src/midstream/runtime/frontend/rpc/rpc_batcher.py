"""Carries what the requests of an async engine ask of the workers: one call at a time, in which all
that has come together meanwhile goes along.

So the number of calls follows the engine's steps and not the number of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from midstream.runtime.frontend.rpc.fetch import Exchange, collect, collect_partial
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.results import WorkerAnswers
from midstream.runtime.protocol.rpc import A, ReadScores, ReleaseRequests, RpcRequest
from midstream.runtime.protocol.scores import ScoreBlock, Span, score_blocks


class AsyncCall(Protocol):
    """Sends a request to all workers of an engine and returns their answers."""

    def __call__(self, request: RpcRequest[A], /) -> Awaitable[list[A]]: ...


_Waiting = dict[str, tuple[Any, "asyncio.Future[Any]"]]

# Results that are collected together.
_BATCH_REQUESTS = 64


class RpcBatcher:
    """One engine's. All methods are for the loop that the engine runs on."""

    def __init__(self, call: AsyncCall, workers: Sequence[RemoteWorker]) -> None:
        """Args:
        call: sends a request to all workers.
        workers: each worker.
        """
        self._call = call
        self._workers = workers
        self._peeks: _Waiting = {}
        self._pieces: _Waiting = {}
        self._collects: _Waiting = {}
        self._releases: _Waiting = {}
        self._task: asyncio.Task[None] | None = None

    async def peek(self, uid: str, span: Span) -> list[ScoreBlock]:
        """A request's scores at positions [start, stop) that have been computed.

        A request may wait for one such answer at a time.
        """
        found: list[ScoreBlock] = await self._wait(self._peeks, uid, span)
        return found

    async def collect_partial(self, uid: str, stops: Mapping[str, int]) -> WorkerAnswers:
        """Rows of a request that goes on, per vLLM's id those up to a position; the workers forget
        them. A request may wait for one such answer at a time.
        """
        found: WorkerAnswers = await self._wait(self._pieces, uid, stops)
        return found

    async def collect(self, uid: str) -> WorkerAnswers:
        """All results of a request that has ended; the workers forget it."""
        found: WorkerAnswers = await self._wait(self._collects, uid, None)
        return found

    async def release(self, uid: str) -> None:
        """Has the workers forget a request."""
        await self._wait(self._releases, uid, None)

    def close(self) -> None:
        """Stops; who waits is cancelled. For any thread."""
        task = self._task
        if task is not None and not task.get_loop().is_closed():
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def _wait(self, waiting: _Waiting, uid: str, argument: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        waiting[uid] = (argument, future)
        if self._task is None:
            # It starts after everybody whom this step's outputs have woken.
            self._task = asyncio.create_task(self._run(), name="midstream courier")
        return await future

    async def _run(self) -> None:
        try:
            while self._peeks or self._pieces or self._collects or self._releases:
                await self._do_peeks()
                await self._do_pieces()
                await self._do_releases()
                await self._do_collects()
        finally:
            self._task = None
            for waiting in (self._peeks, self._pieces, self._collects, self._releases):
                # Only where this task was cancelled is anybody left.
                for _, future in waiting.values():
                    future.cancel()
                waiting.clear()

    async def _do_peeks(self) -> None:
        async def work(asked: dict[str, Any]) -> dict[str, list[ScoreBlock]]:
            found: dict[str, list[ScoreBlock]] = {uid: [] for uid in asked}
            answers = await self._call(ReadScores(asked))
            for worker, answer in zip(self._workers, answers, strict=True):
                for uid, block in score_blocks(worker.info, answer.requests, answer.data):
                    found[uid].append(block)
            return found

        await self._answer(self._peeks, work)

    async def _do_releases(self) -> None:
        async def work(asked: dict[str, Any]) -> dict[str, None]:
            await self._call(ReleaseRequests(list(asked)))
            return {}

        await self._answer(self._releases, work)

    async def _do_pieces(self) -> None:
        async def work(asked: dict[str, Any]) -> dict[str, WorkerAnswers]:
            return await self._carry_out(collect_partial(self._workers, asked))

        await self._answer(self._pieces, work)

    async def _do_collects(self) -> None:
        async def work(asked: dict[str, Any]) -> dict[str, WorkerAnswers]:
            return await self._carry_out(collect(self._workers, list(asked)))

        await self._answer(self._collects, work, _BATCH_REQUESTS)

    async def _carry_out(
        self, exchange: Exchange[dict[str, WorkerAnswers]]
    ) -> dict[str, WorkerAnswers]:
        try:
            wanted = next(exchange)
            while True:
                answers = await self._call(wanted)
                wanted = exchange.send(answers)
                # There is more to read: those who stream scores need not wait for all of it.
                await self._do_peeks()
        except StopIteration as end:
            found: dict[str, WorkerAnswers] = end.value
            return found

    async def _answer(
        self,
        waiting: _Waiting,
        work: Callable[[dict[str, Any]], Awaitable[dict[str, Any]]],
        most: int | None = None,
    ) -> None:
        """Does the work for those who wait, at most so many together, and tells them."""
        batch = {uid: waiting.pop(uid) for uid in list(waiting)[:most]}
        asked = {uid: argument for uid, (argument, future) in batch.items() if not future.done()}
        if not asked:
            return
        futures = [(uid, batch[uid][1]) for uid in asked]
        found: dict[str, Any] | BaseException
        try:
            [found] = await asyncio.gather(work(asked), return_exceptions=True)
        except asyncio.CancelledError:
            for _, future in futures:
                future.cancel()
            raise
        for uid, future in futures:
            if future.done():
                continue
            if isinstance(found, BaseException):
                future.set_exception(found)
            else:
                future.set_result(found.get(uid))
