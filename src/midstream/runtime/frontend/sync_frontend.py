"""The front end of an engine that runs as it is stepped: results join the outputs there."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.base import BaseFrontEnd
from midstream.runtime.frontend.engine_info import describe
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.results import delivery
from midstream.runtime.frontend.results.assembly import assemble
from midstream.runtime.frontend.results.delivery import RESULTS, FinishedRequest, PendingDelivery
from midstream.runtime.frontend.results.partial_rows import LOOK_SECONDS, PartialRows
from midstream.runtime.frontend.results.progress import RequestProgress, lengths_of, running_of
from midstream.runtime.frontend.results.receipts import ReceiptReporter
from midstream.runtime.frontend.rpc.fetch import (
    Exchange,
    carry_on,
    carry_out,
    collect,
    collect_partial,
)
from midstream.runtime.frontend.rpc.rpc_client import Started, start_rpc
from midstream.runtime.protocol.request_payload import uid_of
from midstream.runtime.protocol.results import WorkerAnswers
from midstream.runtime.protocol.rpc import (
    RPC,
    A,
    DescribeWorker,
    ReleaseRequests,
    RpcRequest,
    arguments_of,
    read_answers,
)
from midstream.spec import Plan

# Finished requests are fetched together: so many while the engine runs, which goes on meanwhile,
# and at most so many at a time.
_FETCH_REQUESTS = 16
_BATCH_REQUESTS = 64


@dataclass(frozen=True, slots=True)
class _Fetch:
    """Results on their way.

    Attributes:
        batch: whose they are: what each asked for, and its output.
        exchange: fetches the results; see `rpc.fetch`.
        request: first request of the exchange.
        answers: the workers' answers to it.
    """

    batch: list[tuple[AdmittedRequest, Any]]
    exchange: Exchange[dict[str, WorkerAnswers]]
    request: RpcRequest[Any]
    answers: Started


class FrontEnd(BaseFrontEnd):
    """The front door of an `LLMEngine`, as long as that lives."""

    def __init__(self, engine: Any) -> None:
        self._rpc: Callable[..., list[object]] = engine.collective_rpc
        self._has_unfinished: Callable[[], bool] = engine.has_unfinished_requests
        super().__init__(describe([self._call(DescribeWorker())]), engine, deltas=False)
        self._mismatches = ReceiptReporter(self._config)
        self._reports = True
        self._outputs = engine.output_processor
        self._under_way: dict[str, AdmittedRequest] = {}
        self._finished: list[tuple[AdmittedRequest, Any]] = []
        self._start = start_rpc(engine)
        self._fetch: _Fetch | None = None
        self._sent: list[PendingDelivery] = []
        self._pieces: dict[str, PartialRows] = {}
        self._look_at = 0.0

    def check_id(self, request_id: str) -> None:
        if request_id in self._under_way:
            raise _taken(request_id)

    def admit(self, request: Any, plan: Plan | CallPlan | None) -> AdmittedRequest | None:
        # Not even one that asks for nothing may have it: its output would be taken for this one's.
        if request.request_id in self._under_way or request.request_id in (
            self._outputs.external_req_ids
        ):
            raise _taken(request.request_id)
        asked = super().admit(request, plan)
        if asked is not None:
            self._under_way[request.request_id] = asked
            pieces = PartialRows.of(
                asked, request.request_id, request.sampling_params.n, self.sinks, self._vectors
            )
            if pieces is not None:
                self._pieces[asked.uid] = pieces
        return asked

    def send(self, request: Any, deliver: Callable[[Any], object]) -> None:
        """Hands a request to the engine, when there is room for what it asks for.

        Args:
            request: vLLM's EngineCoreRequest, as the engine's client is given it.
            deliver: the client's own way of sending it.
        """
        uid = uid_of(request.sampling_params) if self._pieces else None
        if uid in self._pieces:
            self._pieces[uid].ids.append(request.request_id)
        self._submit(request, lambda: deliver(request))

    def after_step(self, outputs: list[Any]) -> list[Any]:
        """The outputs of one engine step; results of finished requests are put on them.

        What finished a moment ago may get its results a few steps later, in one fetch with
        others, but never later than the engine's last step. That one waits for them, and for the
        sinks.

        Raises:
            ReceiptError: what was done for a request is not what it asked for. Raised once the
                engine is idle, when every output has its results, unless `report_at_end` is open.
        """
        ended: list[str] = []
        for output in outputs:
            completions = output.outputs if isinstance(output.outputs, list) else []
            for holder in (output, *completions):
                for name in RESULTS:
                    setattr(holder, name, None)
            if output.finished and output.request_id in self._under_way:
                asked = self._under_way.pop(output.request_id)
                self._finished.append((asked, output))
                ended.append(asked.uid)
        self._release_tables(ended)
        if self._pieces and time.monotonic() >= self._look_at:
            self._hand_over()
        idle = not self._has_unfinished()
        if self._fetch is not None and self._fetch.answers.done():
            self._take_in()
        # Those who wait for room may be all that is left, and then no further step would end.
        if idle or self._admission.waiting:
            self._fetch_all()
        elif len(self._finished) >= _FETCH_REQUESTS:
            self._begin_fetch()
        if idle:
            self.sinks.drain()
            self._settle(list(self._sent))
            self.let_go()
            if self._reports:
                self._mismatches.report()
        return outputs

    @contextmanager
    def report_at_end(self) -> Iterator[list[Any]]:
        """While this is open, what differs from what was asked is not raised by a step but at the
        end, with the outputs that were put into the list.

        Raises:
            ReceiptError: as `after_step`.
        """
        outputs: list[Any] = []
        self._reports = False
        try:
            yield outputs
        finally:
            self._reports = True
        self._mismatches.report(outputs)

    def _begin_fetch(self) -> None:
        """Asks for the results of finished requests, unless those of others are on their way."""
        if self._fetch is not None or not self._finished:
            return
        batch, self._finished = self._finished[:_BATCH_REQUESTS], self._finished[_BATCH_REQUESTS:]
        exchange = collect(self._workers[0], [asked.uid for asked, _ in batch])
        request = next(exchange)
        self._fetch = _Fetch(batch, exchange, request, self._start(request))

    def _fetch_all(self) -> None:
        """Fetches the results of all finished requests."""
        while self._finished or self._fetch is not None:
            self._begin_fetch()
            self._take_in()

    def _take_in(self) -> None:
        """Waits for the results that were asked for, if any were, and hands them to the sinks."""
        fetch = self._fetch
        if fetch is None:
            return
        # Who is interrupted here waits for them again: `drop` does.
        wait_for([fetch.answers])
        self._fetch = None
        try:
            self._settle([one for one in self._sent if not one.waits])
            answers = read_answers(fetch.request, fetch.answers.result())
            data = carry_on(fetch.exchange, answers, self._call)
            for asked, output in fetch.batch:
                # Here it is that a sink without room keeps the engine from its next step.
                self._sent.append(self._hand_to_sinks(asked, output, data[asked.uid]))
        finally:
            self._release([asked.uid for asked, _ in fetch.batch])

    def after_abort(self, alive: Container[str]) -> None:
        """Lets go of the requests under way whose ids are no longer among those alive."""
        self._give_up([name for name in self._under_way if name not in alive])

    def let_go(self) -> None:
        """Has the workers forget what was asked for by requests that ended without an output."""
        self._give_up(list(self._under_way))

    def drop(self, request_ids: Container[str]) -> None:
        """Lets go of some requests, results that wait to be fetched included: the call that made
        them was given up.
        """
        self._take_in()
        finished, self._finished = self._finished, []
        for asked, output in finished:
            if output.request_id in request_ids:
                self._under_way[output.request_id] = asked
            else:
                self._finished.append((asked, output))
        # What was handed to a sink stays there; nobody is told of it.
        self._sent = [one for one in self._sent if one.output.request_id not in request_ids]
        self._mismatches.forget(request_ids)
        self._give_up([name for name in self._under_way if name in request_ids])

    def _hand_to_sinks(
        self, asked: AdmittedRequest, output: Any, answers: WorkerAnswers
    ) -> PendingDelivery:
        """Puts together what was fetched of a request, and hands it to the sinks."""
        pieces = self._pieces.get(asked.uid)
        before = {} if pieces is None else pieces.before()
        try:
            blocks = assemble(output, asked.plan, answers, self.info.dtype, before)
            finished = FinishedRequest(asked, output, self._vectors, pieces, blocks)
            return delivery.send(self.sinks, finished)
        finally:
            self._end_pieces(asked.uid)

    def _hand_over(self) -> None:
        """Fetches rows of requests that run, and hands them to the sinks that want them so."""
        states = self._outputs.request_states
        due = {
            uid: running_of(states, pieces.ids)
            for uid, pieces in self._pieces.items()
            if pieces.is_due(lengths_of(states, pieces.ids))
        }
        try:
            self._hand_over_of(due)
        except BaseException:
            # What was on its way is lost: their receipts say so.
            for uid in due:
                self._end_pieces(uid)
            raise
        self._look_at = time.monotonic() + LOOK_SECONDS

    def _hand_over_of(self, due: dict[str, dict[str, RequestProgress]]) -> None:
        if not due:
            return
        stops = {uid: self._pieces[uid].ask(known) for uid, known in due.items()}
        answers = carry_out(collect_partial(self._workers[0], stops), self._call)
        for uid in due:
            pieces = self._pieces[uid]
            self._release_rows(uid, pieces.take_in(answers.pop(uid)))
            for route, index, given, size in pieces.deliveries():
                pieces.note(route, index, self.sinks.queue(route.sink).put(given, size))

    def _end_pieces(self, uid: str) -> None:
        """No more pieces come of a request; where its last did not come, one says so."""
        pieces = self._pieces.pop(uid, None)
        if pieces is not None:
            for route, delivery in pieces.endings():
                self.sinks.queue(route.sink).put_empty(delivery)

    def _settle(self, sent: list[PendingDelivery]) -> None:
        """Waits until sinks have told of these, and puts it on their outputs."""
        for one in sent:
            one.settle()
            self._sent.remove(one)
            self._mismatches.add(one.output)

    def _give_up(self, names: list[str]) -> None:
        """Has the workers forget these requests under way."""
        if names:
            uids = [self._under_way.pop(name).uid for name in names]
            for uid in uids:
                self._end_pieces(uid)
            self._call(ReleaseRequests(uids))
            self._release(uids)

    def _call(self, request: RpcRequest[A]) -> list[A]:
        return read_answers(request, self._rpc(RPC, args=arguments_of(request)))


def _taken(request_id: str) -> SpecError:
    return SpecError("", f"a request with the id {request_id!r} is under way; use another id")
