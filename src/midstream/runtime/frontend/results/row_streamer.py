"""Passes on rows of an async engine's requests while they run: to sinks, and to outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from midstream.results.activations import Activations
from midstream.runtime.frontend.call import GenerateCall
from midstream.runtime.frontend.results.progress import lengths_of, running_of
from midstream.sinks.sink_set import SinkSet


class RowStreamer:
    """One engine's. All methods are for the loop that the engine runs on, and for orders that have
    pieces.
    """

    def __init__(self, sinks: SinkSet, came: Callable[[str, int], None]) -> None:
        """Args:
        sinks: the engine's.
        came: told of the bytes of rows that were fetched for a uid.
        """
        self._sinks = sinks
        self._came = came

    def is_due(self, order: GenerateCall, states: Mapping[str, Any]) -> bool:
        """Whether a sink is to get rows of a call, and none are on their way to it."""
        assert order.pieces is not None
        if order.replica is None or order.passing.locked() or order.pieces.is_over:
            return False
        return order.pieces.is_due(lengths_of(states, order.pieces.ids))

    async def pass_on(self, order: GenerateCall, states: Mapping[str, Any]) -> None:
        """Gives sinks what there is of a call. Waits while one of them has no room.

        Args:
            order: the call's.
            states: vLLM's, of the requests that run.
        """
        pieces = order.pieces
        assert pieces is not None
        async with order.passing:
            # Only now: while others were at it, more may have come.
            known = running_of(states, pieces.ids)
            if pieces.is_over or not known:
                return
            await self._fetch(order, pieces.ask(known))
            for route, index, delivery, size in pieces.deliveries():
                queue = self._sinks.queue(route.sink)
                pieces.note(route, index, await queue.put_soon(delivery, size))

    async def show(self, order: GenerateCall, is_aborted: bool) -> Activations:
        """The rows for a call's next output, which is not its last, or that of an abort: then what
        is here already.
        """
        assert order.pieces is not None
        assert order.streamed is not None
        tokens = order.streamed.tokens
        async with order.passing:
            if not is_aborted:
                stop = order.pieces.stop(len(tokens))
                await self._fetch(order, dict.fromkeys(order.pieces.ids, stop))
            return order.pieces.shown(tokens, order.is_delta)

    async def stop(self, order: GenerateCall) -> None:
        """Nothing is passed on any more: all else comes at the end."""
        if order.pieces is not None:
            async with order.passing:
                order.pieces.is_over = True

    async def end(self, order: GenerateCall) -> None:
        """A call is over: sinks that had pieces of it and no last one get that."""
        assert order.pieces is not None
        await self.stop(order)
        for route, delivery in order.pieces.endings():
            self._sinks.queue(route.sink).put_empty(delivery)

    async def _fetch(self, order: GenerateCall, stops: dict[str, int]) -> None:
        assert order.asked is not None
        assert order.pieces is not None
        assert order.replica is not None
        uid = order.asked.uid
        answers = await order.replica.courier.hand_over(uid, stops)
        self._came(uid, order.pieces.take_in(answers))
