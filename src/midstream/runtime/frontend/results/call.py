"""One call of `AsyncLLM.generate`, from its arguments to its last output."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from midstream.plan import Plan
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.input_session import InputSession
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.intake import Wait
from midstream.runtime.frontend.results.partial_rows import PartialRows
from midstream.runtime.frontend.results.partial_scores import StreamState
from midstream.runtime.frontend.rpc.replicas import Replica
from midstream.runtime.frontend.tracing import DelayedSpan
from midstream.sinks.name_claims import RequestNames
from midstream.sinks.sink_set import SinkSet


@dataclass(eq=False, slots=True)
class GenerateCall:
    """State of one call."""

    call_plan: CallPlan
    session: InputSession | None = None  # None: an ordinary prompt
    admitted: AdmittedRequest | None = None  # None before validation, and if no plan applies
    is_delta: bool = False  # each output has only the tokens since the previous one
    ids: list[str] = field(default_factory=list)  # vLLM's ids of its requests; several with n > 1
    replica: Replica | None = None  # None: nothing was sent yet
    wait: Wait | None = None  # for capacity; None: it never waited
    sends: list[asyncio.Task[None]] = field(default_factory=list)  # which had waited
    stream: StreamState | None = None  # tokens and scores so far
    is_collected: bool = False  # the workers hold no results of it any more
    is_over: bool = False  # its caller has left, possibly before validation
    failure: BaseException | None = None  # why a request could not be sent
    partial_rows: PartialRows | None = None  # delivered before its end
    spans: list[DelayedSpan] = field(default_factory=list)  # which wait for receipts
    names: RequestNames | None = None  # that its caller gives its rows in sinks

    async def take_names(self, sinks: SinkSet) -> None:
        """Check where its captures are stored, and take the names that they give their rows."""
        if (plan := self.plan) is None or not plan.captures:
            return
        self.names = sinks.names_of(plan)
        if sinks.has_places(plan):
            await asyncio.to_thread(sinks.check_places, plan)
        if self.names is not None:
            await asyncio.to_thread(self.names.take)

    def release_names(self) -> None:
        """Give them back: its rows are in the queues of the sinks, or never will be."""
        if self.names is not None:
            self.names.release()

    @property
    def uid(self) -> str:
        assert self.admitted is not None
        return self.admitted.uid

    @property
    def plan(self) -> Plan | None:
        return self.call_plan.plan
