"""Delivery of rows of running requests, to sinks and to outputs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from midstream.results.activations import Activations
from midstream.runtime.frontend.results.call import GenerateCall
from midstream.runtime.frontend.results.partial_rows import (
    PartialRows,
    RequestProgress,
    lengths_of,
    running_of,
)
from midstream.runtime.frontend.rpc.background_tasks import BackgroundTasks
from midstream.runtime.protocol.results import WorkerAnswers
from midstream.sinks.delivery import run_puts, run_puts_soon
from midstream.sinks.sink_set import SinkSet

# Interval between checks whether a sink should get rows.
CHECK_SECONDS = 0.05

FetchRows = Callable[[dict[str, dict[str, int]]], dict[str, WorkerAnswers]]


class StepRowStreamer:
    """Delivers rows of a synchronous engine's running requests, between its steps."""

    def __init__(
        self, sinks: SinkSet, received: Callable[[str, int], None], fetch: FetchRows
    ) -> None:
        """Create it; `received` is called with the uid and the bytes of rows that were fetched."""
        self._sinks = sinks
        self._received = received
        self._fetch = fetch
        self._partial_rows: dict[str, PartialRows] = {}
        self._next_check = 0.0

    def __len__(self) -> int:
        return len(self._partial_rows)

    def add(self, uid: str, partial: PartialRows) -> None:
        self._partial_rows[uid] = partial

    def get(self, uid: str | None) -> PartialRows | None:
        """Return the rows of a request; None: none of it are delivered before its end."""
        return None if uid is None else self._partial_rows.get(uid)

    def deliver_due(self, states: Mapping[str, Any]) -> None:
        """Fetch rows, and put them into sinks that should get them now. Blocks if one is full."""
        if not self._partial_rows or time.monotonic() < self._next_check:
            return
        due = {
            uid: running_of(states, partial.ids)
            for uid, partial in self._partial_rows.items()
            if partial.is_due(lengths_of(states, partial.ids))
        }
        try:
            self._deliver(due)
        except BaseException:
            # Rows that were being fetched are lost: receipts report them as missing.
            for uid in due:
                self.end(uid)
            raise
        self._next_check = time.monotonic() + CHECK_SECONDS

    def end(self, uid: str) -> None:
        """Deliver no more pieces of a request; sinks that lack its last one get an empty one."""
        partial = self._partial_rows.pop(uid, None)
        if partial is not None:
            for route, delivery in partial.endings():
                self._sinks.queue(route.sink).put_empty(delivery)

    def _deliver(self, due: Mapping[str, Mapping[str, RequestProgress]]) -> None:
        if not due:
            return
        answers = self._fetch({uid: self._partial_rows[uid].request(due[uid]) for uid in due})
        for uid in due:
            partial = self._partial_rows[uid]
            self._received(uid, partial.receive(answers.pop(uid)))
            run_puts(partial.pieces(), self._sinks)


class RowStreamer:
    """Delivers rows of an asynchronous engine's calls with `partial_rows`, on its event loop."""

    def __init__(
        self, sinks: SinkSet, received: Callable[[str, int], None], tasks: BackgroundTasks
    ) -> None:
        self._sinks = sinks
        self._received = received
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None

    def run(
        self,
        calls: Callable[[], Iterable[GenerateCall]],
        states: Callable[[], Mapping[str, Any]],
    ) -> None:
        """Deliver rows in the background, as long as there are calls that have `partial_rows`."""
        if self._task is None:
            self._task = self._tasks.start(self._run(calls, states))

    async def _run(
        self,
        calls: Callable[[], Iterable[GenerateCall]],
        states: Callable[[], Mapping[str, Any]],
    ) -> None:
        try:
            while streamed := [call for call in calls() if call.partial_rows is not None]:
                known = states()
                for call in streamed:
                    if self.is_due(call, known):
                        self._tasks.start(self.deliver(call, known))
                await asyncio.sleep(CHECK_SECONDS)
        finally:
            self._task = None

    def is_due(self, call: GenerateCall, states: Mapping[str, Any]) -> bool:
        """Return whether a sink should get rows of a call now, and no delivery is under way."""
        assert call.partial_rows is not None
        if call.replica is None or call.partial_rows.lock.locked() or call.partial_rows.is_over:
            return False
        return call.partial_rows.is_due(lengths_of(states, call.partial_rows.ids))

    async def deliver(self, call: GenerateCall, states: Mapping[str, Any]) -> None:
        """Deliver the rows of a call that exist by now to sinks. Waits while a sink is full."""
        partial = call.partial_rows
        assert partial is not None
        async with partial.lock:
            # Read only now: there may be more since the lock was requested.
            known = running_of(states, partial.ids)
            if partial.is_over or not known:
                return
            await self._fetch(call, partial.request(known))
            await run_puts_soon(partial.pieces(), self._sinks)

    async def show(self, call: GenerateCall, is_aborted: bool) -> Activations:
        """Return the rows for an output; of an aborted call none is fetched any more."""
        assert call.partial_rows is not None
        assert call.stream is not None
        tokens = call.stream.tokens
        async with call.partial_rows.lock:
            if not is_aborted:
                stop = call.partial_rows.stop(len(tokens))
                await self._fetch(call, dict.fromkeys(call.partial_rows.ids, stop))
            return call.partial_rows.shown(tokens, call.is_delta)

    async def stop(self, call: GenerateCall) -> None:
        """Wait for deliveries under way, and start no others: the other rows come at the end."""
        assert call.partial_rows is not None
        async with call.partial_rows.lock:
            call.partial_rows.is_over = True

    async def end(self, call: GenerateCall) -> None:
        """Deliver a last piece to sinks which got pieces of a call and not its last one."""
        await self.stop(call)
        assert call.partial_rows is not None
        for route, delivery in call.partial_rows.endings():
            self._sinks.queue(route.sink).put_empty(delivery)

    async def _fetch(self, call: GenerateCall, stops: dict[str, int]) -> None:
        assert call.admitted is not None
        assert call.partial_rows is not None
        assert call.replica is not None
        uid = call.admitted.uid
        answers = await call.replica.batcher.collect_partial(uid, stops)
        self._received(uid, call.partial_rows.receive(answers))
