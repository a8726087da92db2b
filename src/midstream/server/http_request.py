"""State of one HTTP request: its plan on the way in, its results on the way out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import AsyncGeneratorType
from typing import Any

from midstream.config.http import HttpSettings
from midstream.errors import BusyError, HttpError, MidstreamError, ReceiptError, SpecError
from midstream.plan.probe import Probe
from midstream.results.readouts import RESULTS
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.server import audit_log
from midstream.server.cached_rows.capture_cache import CaptureCache, Reservation
from midstream.server.request_field import MidstreamField
from midstream.sites import Tap

_SHOWN = 500  # characters of a problem in the log
Outputs = AsyncGenerator[Any, None]  # of an engine call


@dataclass(slots=True)
class ChoiceUpdate:
    """Results of one choice since the last update was sent."""

    probes: Any = None  # latest scores by name, cumulative; None if there are none
    rows: list[Any] = field(default_factory=list)  # partial rows, without overlap
    readouts: dict[str, list[Any]] = field(default_factory=dict)  # the same, by attribute
    guards: Any = None  # flags of the server's guards, once the choice has ended; else None
    final: Any = None  # vLLM's CompletionOutput, once the choice has ended; else None
    request_id: str = ""


@dataclass(eq=False, slots=True)
class RequestContext:
    """State of one HTTP request."""

    request_field: MidstreamField
    client: str  # see `Server.client_of`
    messages: Any = None  # of a chat; None for other requests
    template: dict[str, Any] = field(default_factory=dict)
    calls: int = 0  # engine calls that the request has made
    per_call: int = 1  # choices of each call
    updates: dict[int, ChoiceUpdate] = field(default_factory=dict)  # by choice; not sent yet
    scores_sent: dict[tuple[int, str], int] = field(default_factory=dict)  # by choice and probe
    rows_sent: dict[int, dict[Tap, int]] = field(default_factory=dict)  # last position by choice
    streams: list[AsyncGeneratorType[Any, None]] = field(default_factory=list)  # of the calls
    undelivered: list[str] = field(default_factory=list)  # ids of rows that no sent response names
    reservation: Reservation | None = None  # room in the cache; None: not cached
    invalid_field: str = ""  # path of the field that the engine rejected; empty if none
    refusal: HttpError | None = None  # the answer in place of vLLM's
    failure: HttpError | None = None  # the answer for handlers of vLLM that let a failure pass

    def call_plan(self, limits: HttpSettings, guards: tuple[Probe, ...] = ()) -> CallPlan:
        returned, most = self.request_field.activations, None
        if returned == "inline":
            most = limits.inline_bytes
        elif returned == "handle":
            most = min(limits.client_bytes, limits.held_bytes)
        plan, asked = self.request_field.plan, (self.messages, self.template, most)
        return CallPlan(plan, *asked, guards=guards, client=self.client)

    def track(
        self, stream: Outputs, per_call: int, running: AbstractContextManager[None]
    ) -> Outputs:
        """Return a call's output stream, which records its results, and has `running` entered."""
        first = self.calls * per_call
        self.calls += 1
        self.per_call = per_call
        tracked = self._tracked(stream, first, running)
        assert isinstance(tracked, AsyncGeneratorType)
        self.streams.append(tracked)
        return tracked

    @property
    def is_single(self) -> bool:
        return self.calls * self.per_call == 1

    def take_updates(self) -> dict[int, ChoiceUpdate]:
        """Return and clear the updates, which count as sent."""
        updates, self.updates = self.updates, {}
        return updates

    async def close(self, captures: CaptureCache) -> None:
        """Close the engine calls, and free cached rows that no sent response refers to."""
        for stream in self.streams:
            # A generator that is running cannot be closed: a response cancelled while sending may
            # still be iterating over it.
            if not stream.ag_running:
                await stream.aclose()
        if self.reservation is not None:
            captures.release(self.reservation)
        while self.undelivered:
            captures.delete(self.undelivered.pop())

    async def _tracked(
        self, stream: Outputs, first: int, running: AbstractContextManager[None]
    ) -> Outputs:
        try:
            with running:
                async for output in stream:
                    for completion in output.outputs:
                        self._record(first + completion.index, output, completion)
                    yield output
        except SpecError as error:
            explained = self.request_field.explain(error)
            self.invalid_field = explained.path
            self.failure = HttpError.of(explained)
            if self.failure.status != 400:  # vLLM answers each ValueError so
                self.refusal = self.failure
            raise explained from None
        except BusyError as error:
            self.refusal = HttpError.of(error)
            raise
        except ReceiptError as error:
            self.failure = HttpError.of(error)
            audit_log.log_event("receipt.problem", problem=str(error)[:_SHOWN])
            raise
        except MidstreamError as error:
            self.failure = HttpError(500, str(error))
            raise
        finally:
            await stream.aclose()

    def _record(self, choice: int, output: Any, completion: Any) -> None:
        if completion.finish_reason == "abort" and self.request_field.plan is not None:
            audit_log.log_event("request.ended", request_id=output.request_id[:_SHOWN])
            self.refusal = HttpError(503, "the server ended the request before its end")
            return
        update = self.updates.setdefault(choice, ChoiceUpdate())
        update.request_id = output.request_id
        if self.request_field.guards:
            update.guards = getattr(completion, "guards", None)
            if update.guards is None and completion.finish_reason is not None:
                update.guards = []
        if completion.probes is not None:
            update.probes = completion.probes
        if completion.receipt is not None:
            if completion.receipt.problems:
                # With on_mismatch="raise" the engine raises instead.
                problem = completion.receipt.complaint[:_SHOWN]
                audit_log.log_event("receipt.problem", problem=problem)
            update.final = completion
            return
        if completion.activations is not None:
            update.rows.append(completion.activations)
        for name, kind in RESULTS.items():
            result = getattr(completion, name)
            if result is not None and kind.rows_field:
                update.readouts.setdefault(name, []).append(result)
