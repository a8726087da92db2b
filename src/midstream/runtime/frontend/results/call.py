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
    """State of one call.

    Attributes:
        call_plan: its plan, as attached to its sampling parameters.
        session: its session of streaming input; None: an ordinary prompt.
        admitted: the request as validated; None before that, and if no plan applies to it.
        is_delta: whether each output has only the tokens since the previous one.
        ids: vLLM's ids of its requests; several with n > 1.
        replica: the engine that its requests run on; None: none was sent yet.
        wait: its wait for capacity; None: it never waited.
        sends: tasks that send requests which waited for capacity.
        stream: tokens and scores so far; None before the first output.
        is_collected: whether the workers hold no results of it any more.
        is_over: whether its caller has left, possibly before its request was validated.
        failure: why a request could not be sent.
        partial_rows: its rows that are delivered before its end; None: none are.
        spans: spans of its requests that wait for receipts.
        names: the names that its caller gives its rows in sinks; None: none.
    """

    call_plan: CallPlan
    session: InputSession | None = None
    admitted: AdmittedRequest | None = None
    is_delta: bool = False
    ids: list[str] = field(default_factory=list)
    replica: Replica | None = None
    wait: Wait | None = None
    sends: list[asyncio.Task[None]] = field(default_factory=list)
    stream: StreamState | None = None
    is_collected: bool = False
    is_over: bool = False
    failure: BaseException | None = None
    partial_rows: PartialRows | None = None
    spans: list[DelayedSpan] = field(default_factory=list)
    names: RequestNames | None = None

    async def take_names(self, sinks: SinkSet) -> None:
        """Check where its captures are stored, and take the names that they give their rows; see
        `SinkSet.check_places` and `RequestNames.take`.
        """
        self.names = sinks.names_of(self.plan)
        if self.plan is not None and sinks.has_places(self.plan):
            await asyncio.to_thread(sinks.check_places, self.plan)
        if self.names is not None:
            await asyncio.to_thread(self.names.take)

    def release_names(self) -> None:
        """Give them back: its rows are in the queues of the sinks, or never will be."""
        if self.names is not None:
            self.names.release()

    @property
    def uid(self) -> str:
        """midstream's id of its admitted request."""
        assert self.admitted is not None
        return self.admitted.uid

    @property
    def plan(self) -> Plan | None:
        """The request's own plan; None: only what applies to every request."""
        return self.call_plan.plan
