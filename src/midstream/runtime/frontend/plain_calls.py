"""Calls of an asynchronous engine to which nothing applies: vLLM alone serves them."""

from __future__ import annotations

from collections import Counter


class PlainCalls:
    """The calls that run, by the ids that their callers gave them, which may be given twice.

    A request of such a call may be validated after something was set for every request: it began
    before, and has no plan in which its results could be found.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._counts

    def __len__(self) -> int:
        return len(self._counts)

    def begin(self, request_id: str) -> None:
        """Begin a call; pair with `leave`."""
        self._counts[request_id] += 1

    def leave(self, request_id: str) -> None:
        self._counts[request_id] -= 1
        if not self._counts[request_id]:
            del self._counts[request_id]
