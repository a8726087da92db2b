"""Requests of clients that run now, by their ids, so that each client can change its own."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.errors import HttpError
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.server.open_requests import DictEntry


@dataclass(frozen=True, slots=True, eq=False)
class RunningCall:
    """A call of the engine for a client's request; a request with several prompts makes several."""

    request: object  # others may have the same id, which clients choose
    request_id: str  # the engine's: the request's, with a suffix if there are several
    client: str  # see `Server.client_of`
    call_plan: CallPlan  # which no other call has
    first: int  # index of the call's first choice in the response
    is_numbered: bool = True  # whether `request_id` is the response's with a number after it

    def is_of(self, request_id: str) -> bool:
        if not self.is_numbered:
            return self.request_id == request_id
        number = self.request_id.removeprefix(request_id)
        return number != self.request_id and number[:1] in ("-", "_") and number[1:].isdigit()


class RunningRequests:
    """The calls with a plan that run. Not thread-safe: call on the event loop."""

    def __init__(self) -> None:
        self._calls: dict[int, RunningCall] = {}

    def running(self, call: RunningCall) -> DictEntry[int, RunningCall]:
        """Have a call among these for the duration of the context."""
        return DictEntry(self._calls, id(call), call)

    def find(self, request_id: str, client: str) -> list[RunningCall]:
        """Return a request's calls by the response's id or a call's, in order of choices."""
        mine = [call for call in self._calls.values() if call.client == client]
        # A client may choose ids such that one is another with a number after it.
        calls = [call for call in mine if call.is_of(request_id)]
        calls = calls or [call for call in mine if call.request_id == request_id]
        if (count := len({call.request for call in calls})) > 1:
            raise HttpError(
                409,
                f"{count} running requests of this client have the id {request_id[:64]!r}, so none "
                "is changed: send each request with an X-Request-Id of its own, or with none",
                "id",
            )
        return sorted(calls, key=lambda call: call.first)
