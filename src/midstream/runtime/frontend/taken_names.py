"""Names of rows in sinks that the running requests of a synchronous engine have taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from midstream.plan import Plan
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.sinks.name_claims import RequestNames
from midstream.sinks.sink_set import SinkSet

Keep = Callable[[AdmittedRequest | None], AdmittedRequest | None]


class TakenNames:
    """The names by request; see `RequestNames`. A call of an `AsyncLLM` has its own."""

    def __init__(self, sinks: SinkSet) -> None:
        self._sinks = sinks
        self._by_uid: dict[str, RequestNames] = {}

    @contextmanager
    def taken(self, plan: Plan | CallPlan | None) -> Iterator[Keep]:
        """Take the names in a plan while its request is admitted; what this yields keeps them."""
        names = self._sinks.names_of(plan.plan if isinstance(plan, CallPlan) else plan)
        if names is None:
            yield lambda admitted: admitted
            return
        names.take()
        uids = []

        def keep(admitted: AdmittedRequest | None) -> AdmittedRequest | None:
            if admitted is not None:
                uids.append(admitted.uid)
                self._by_uid[admitted.uid] = names
            return admitted

        try:
            yield keep
        finally:
            if not uids:
                names.release()

    def release(self, uids: Sequence[str]) -> None:
        """Give back the names of requests whose rows are in the sinks' queues, or never will be."""
        for uid in uids:
            if (names := self._by_uid.pop(uid, None)) is not None:
                names.release()
