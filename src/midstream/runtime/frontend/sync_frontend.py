"""The front end of an engine that its caller steps: finished requests get results after a step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor

from midstream.errors import SpecError
from midstream.plan import Plan
from midstream.results.receipt import WeightVersion
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.base import BaseFrontEnd
from midstream.runtime.frontend.engine_info import describe
from midstream.runtime.frontend.engine_use import EngineUse
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.results.delivery import (
    FinishedRequest,
    PendingDelivery,
    deliver,
    set_nothing,
)
from midstream.runtime.frontend.results.partial_rows import PartialRows
from midstream.runtime.frontend.results.receipts import ReceiptReporter
from midstream.runtime.frontend.results.row_streamer import StepRowStreamer
from midstream.runtime.frontend.rpc.fetch import (
    Exchange,
    carry_on,
    carry_out,
    collect,
    collect_partial,
)
from midstream.runtime.frontend.rpc.parameters import check_awake, read_parameter
from midstream.runtime.frontend.rpc.rpc_client import Started, carry_out_whole, start_rpc
from midstream.runtime.frontend.step_controllers import StepControllers
from midstream.runtime.frontend.weight_memory import from_settings
from midstream.runtime.frontend.weight_watch import latest, watch_client
from midstream.runtime.protocol.request_payload import uid_of
from midstream.runtime.protocol.results import WorkerAnswers
from midstream.runtime.protocol.rpc import (
    RPC,
    A,
    DescribeWorker,
    ReadWeights,
    ReleaseRequests,
    RpcRequest,
    arguments_of,
    read_answers,
)

# Results of finished requests are fetched together. While the engine runs, a fetch begins when so
# many requests wait for it; it is for at most so many.
_FETCH_REQUESTS = 16
_BATCH_REQUESTS = 64


class _Stage(Enum):
    """What a finished request waits for."""

    FETCH = auto()  # the fetch that its results are to be part of
    ANSWERS = auto()
    SINKS = auto()  # the sinks that its rows were given to


@dataclass(eq=False, slots=True)
class _FinishedRequest:
    """A finished request whose results are not on its output yet."""

    admitted: AdmittedRequest
    output: Any
    stage: _Stage = _Stage.FETCH
    delivery: PendingDelivery | None = None  # of its rows to sinks


@dataclass(frozen=True, slots=True)
class _Fetch:
    exchange: Exchange[dict[str, WorkerAnswers]]
    request: RpcRequest[Any]
    answers: Started


class FrontEnd(BaseFrontEnd):
    """The front end of an `LLMEngine`, for as long as the engine exists. `use`: by which thread."""

    def __init__(self, engine: Any) -> None:
        self._rpc: Callable[..., list[object]] = engine.collective_rpc
        self._has_unfinished, self._is_sleeping = engine.has_unfinished_requests, engine.is_sleeping
        self.use: EngineUse = EngineUse(self._has_unfinished)
        super().__init__(describe([self._call(DescribeWorker())]), engine, deltas=False)
        self.weights.write = self.changes.send = self._call
        self.directions.carry_out = lambda exchange: carry_out(exchange, self._call)
        for message in from_settings((self.lenses, self.saes), engine.vllm_config):
            self._call(message)
        watch_client(engine.engine_core, self.forget_readings)
        self._reporter, self._reports = ReceiptReporter(self._config), True
        self._running: dict[str, AdmittedRequest] = {}
        self._finished: list[_FinishedRequest] = []
        self._outputs, self._start = engine.output_processor, start_rpc(engine)
        self._fetch: _Fetch | None = None
        self._streamer = StepRowStreamer(self.sinks, self._admission.release_rows, self._fetch_rows)
        self._controllers = StepControllers(self.changes, self._workers[0], self._call)

    def check_id(self, request_id: str) -> None:
        if request_id in self._running:
            raise _taken(request_id)

    def admit(self, request: Any, plan: Plan | CallPlan | None) -> AdmittedRequest | None:
        # Also one without a plan must have another id: its output would be taken for this one's.
        name = request.request_id
        if name in self._running or name in self._outputs.external_req_ids:
            raise _taken(name)
        own = plan.plan if isinstance(plan, CallPlan) else plan
        if own is not None:
            self.sinks.check_places(own)
        with self.names.taken(plan) as keep:
            admitted = keep(super().admit(request, plan))
        if admitted is not None:
            self._running[name] = admitted
            args = name, request.sampling_params.n, self.sinks, self.info.shape
            if (partial := PartialRows.of(admitted, *args)) is not None:
                self._streamer.add(admitted.uid, partial)
            if isinstance(plan, CallPlan):
                self._controllers.add(admitted.uid, plan, admitted.plan, request)
        return admitted

    def send(self, request: Any, deliver: Callable[[Any], object]) -> None:
        """Send a request to the engine by `deliver`, now or when there is capacity for it."""
        partial = self._streamer.get(uid_of(request.sampling_params))
        if partial is not None:
            partial.ids.append(request.request_id)

        def send_now() -> None:
            with self._with_vectors(request):
                deliver(request)

        self._submit(request, send_now)

    def after_step(self, outputs: list[Any]) -> list[Any]:
        """Return a step's outputs; results may come later, before the engine is idle."""
        ended: list[str] = []
        for output in outputs:
            set_nothing(output)
            if output.finished and output.request_id in self._running:
                admitted = self._running.pop(output.request_id)
                self._finished.append(_FinishedRequest(admitted, output))
                ended.append(admitted.uid)
        if ended:
            self._release_tables(ended)
        self._controllers.step(self._outputs.request_states, ended)
        self._streamer.deliver_due(self._outputs.request_states)
        idle = not self._has_unfinished()
        if self._fetch is not None and self._fetch.answers.done():
            self._receive()
        # If requests wait for capacity, they may be all that is left: no step would follow.
        if idle or self._admission.waiting:
            self._fetch_all()
        elif self._finished and len(self._waiting_for(_Stage.FETCH)) >= _FETCH_REQUESTS:
            self._begin_fetch()
        if idle:
            self._end_idle()
        return outputs

    def _end_idle(self) -> None:
        """Set the results that are left, once no request runs, and report them."""
        self.sinks.drain()
        self._set_results(every=True)
        self._release_requests(list(self._running))  # they ended without an output
        if self._reports:
            self._reporter.report()

    @contextmanager
    def report_at_end(self) -> Iterator[list[Any]]:
        """Report problems of a call at its end, not in a step; yield the list for its outputs."""
        outputs: list[Any] = []
        self._reports = False
        try:
            yield outputs
        finally:
            self._reports = True
        self._reporter.report(outputs)

    def after_abort(self, asked: Container[str], alive: Container[str]) -> None:
        """Release the running requests that were aborted: those that are not `alive`. If no other
        runs, no step follows: those that ended before, and were not `asked` to, get their results.
        """
        self._release_requests([name for name in self._running if name not in alive])
        is_wanted = any(request.output.request_id not in asked for request in self._finished)
        if is_wanted and not self._has_unfinished():
            self._fetch_all()
            self._end_idle()

    def drop(self, request_ids: Container[str]) -> None:
        """Release the requests of a call that failed, unreported. Rows stay in their sinks."""
        self._receive()
        kept = []
        for request in self._finished:
            if request.output.request_id not in request_ids:
                kept.append(request)
            elif request.stage is _Stage.FETCH:
                self._running[request.output.request_id] = request.admitted
        self._finished = kept
        self._reporter.forget(request_ids)
        self._release_requests([name for name in self._running if name in request_ids])

    # -- results of finished requests -------------------------------------------------------

    def _waiting_for(self, stage: _Stage) -> list[_FinishedRequest]:
        return [request for request in self._finished if request.stage is stage]

    def _begin_fetch(self) -> None:
        """Begin to fetch results of finished requests, if no fetch is under way."""
        batch = self._waiting_for(_Stage.FETCH)[:_BATCH_REQUESTS]
        if self._fetch is not None or not batch:
            return
        exchange = collect(self._workers[0], [request.admitted.uid for request in batch])
        request = next(exchange)
        self._fetch = _Fetch(exchange, request, self._start(request))
        for finished in batch:
            finished.stage = _Stage.ANSWERS

    def _fetch_all(self) -> None:
        while self._fetch is not None or self._waiting_for(_Stage.FETCH):
            self._begin_fetch()
            self._receive()

    def _receive(self) -> None:
        """Wait for the results that are being fetched, if any, and deliver them."""
        fetch = self._fetch
        if fetch is None:
            return
        wait_for([fetch.answers])  # if this is interrupted, `drop` waits again
        self._set_results()
        self._fetch = None
        batch = self._waiting_for(_Stage.ANSWERS)
        uids = [finished.admitted.uid for finished in batch]
        try:
            answers = read_answers(fetch.request, fetch.answers.result())
            data = carry_on(fetch.exchange, answers, self._call)
            for request in batch:
                # A sink whose queue is full blocks here, and so delays the engine's next step.
                request.delivery = self._deliver(request, data[request.admitted.uid])
                request.stage = _Stage.SINKS
            self._set_results()
        except BaseException:
            self._call(ReleaseRequests(uids))  # the workers keep what was not read
            raise
        finally:
            # After an error, the others of the batch have no results.
            self._finished = [
                finished for finished in self._finished if finished.stage is not _Stage.ANSWERS
            ]
            self._release(uids)

    def _deliver(self, request: _FinishedRequest, answers: WorkerAnswers) -> PendingDelivery:
        """Assemble the results of a request, and put its rows into the queues of their sinks."""
        asked = request.admitted
        partial = self._streamer.get(asked.uid)
        try:
            shape = self.info.shape
            finished = FinishedRequest.of(asked, request.output, shape, answers, partial)
            return deliver(self.sinks, finished)
        finally:
            self._streamer.end(asked.uid)

    def _set_results(self, every: bool = False) -> None:
        """Set results on the outputs whose sinks have finished; of `every` one: wait for them."""
        for request in self._waiting_for(_Stage.SINKS):
            assert request.delivery is not None
            if every or request.delivery.is_done:
                request.delivery.set_results(request.output)
                self._finished.remove(request)
                self._reporter.add(request.output)

    def _release_requests(self, names: list[str]) -> None:
        if names:
            uids = [self._running.pop(name).uid for name in names]
            self._controllers.end(uids)
            for uid in uids:
                self._streamer.end(uid)
            self._call(ReleaseRequests(uids))
            self._release(uids)

    def _fetch_rows(self, stops: dict[str, dict[str, int]]) -> dict[str, WorkerAnswers]:
        """Fetch rows of running requests, per uid; see `collect_partial`."""
        return carry_out_whole(collect_partial(self._workers[0], stops), self._start, self._call)

    def parameter(self, name: str) -> Tensor:
        check_awake(self._is_sleeping())
        return carry_out(read_parameter(name), self._call)

    def weight_version(self) -> WeightVersion:
        return latest(self._call(ReadWeights()))

    def _call(self, request: RpcRequest[A]) -> list[A]:
        with self.use.call():
            return read_answers(request, self._rpc(RPC, args=arguments_of(request)))


def _taken(request_id: str) -> SpecError:
    return SpecError("", f"a request with the id {request_id!r} is under way; use another id")
