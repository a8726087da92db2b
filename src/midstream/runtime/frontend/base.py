"""The front end of one engine: request validation, and waiting for capacity.

How results are returned to callers differs: see `sync_frontend` and `async_frontend`.
"""

from __future__ import annotations

import logging
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from midstream.config.config import KEY, from_additional_config
from midstream.errors import ConfigError, SpecError
from midstream.plan import Capture, Plan
from midstream.plan.plan import ServerWide
from midstream.plan.probe import Probe
from midstream.plan.resolved import ON_DEVICE
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.device_rows import DeviceSources
from midstream.runtime.frontend.engine_info import EngineInfo
from midstream.runtime.frontend.engine_use import EngineUse
from midstream.runtime.frontend.lens_registry import LensRegistry
from midstream.runtime.frontend.request.admission import Admission
from midstream.runtime.frontend.request.budget import (
    ROWS,
    CapacityBudget,
    Need,
    check_returned,
    check_rows,
    row_limit,
)
from midstream.runtime.frontend.request.call_plan import CallPlan, other_args
from midstream.runtime.frontend.request.plan_changes import PlanChanges
from midstream.runtime.frontend.request.plan_resolver import PlanResolver
from midstream.runtime.frontend.request.prepared_plan import PreparedPlan
from midstream.runtime.frontend.request.prompt.media import spans_of
from midstream.runtime.frontend.request.readouts import Registries
from midstream.runtime.frontend.request.request_plans import RequestPlans
from midstream.runtime.frontend.request.sent_vectors import SentVectors
from midstream.runtime.frontend.request.sink_routes import routes_of
from midstream.runtime.frontend.request.token_directions import DirectionCache
from midstream.runtime.frontend.results.sink_setup import open_sinks
from midstream.runtime.frontend.row_reuse import ReusedRows, RowReuse
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.frontend.sae_registry import SaeRegistry
from midstream.runtime.frontend.weight_memory import WeightMemory
from midstream.runtime.protocol.acting_probes import check_stop_strings
from midstream.runtime.protocol.request_payload import RequestPayload, payload_of, uid_of
from midstream.runtime.protocol.rpc import IntegrityReport
from midstream.runtime.protocol.vector_update import VectorUpdate
from midstream.runtime.vllm.additional_config import Settings
from midstream.sinks.name_claims import RequestNames
from midstream.sinks.server_captures import ServerCaptures
from midstream.sinks.sink_set import SinkSet
from midstream.steering import VectorRegistry
from midstream.steering.guards import Guards
from midstream.steering.tiers import Steering

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


class BaseFrontEnd:
    """Validates the requests of one engine, and submits them when there is capacity."""

    use: EngineUse | None = None  # by which thread; None: it does not matter

    def __init__(
        self,
        info: EngineInfo,
        engine: Any,
        deltas: bool,
        busy: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Create the front end, and open the engine's sinks; `busy`: see `Admission`."""
        config = from_additional_config(engine.vllm_config.additional_config)
        assert config is not None
        self._config = config
        self.info = info
        self._workers = _workers_of(info)
        number, share = info.front_ends.number, info.front_ends.count
        self.vectors = VectorRegistry(info.shape)
        self.steering = Steering(self.vectors)
        set_steering(engine.vllm_config, self.vectors, self.steering)
        self.guards = Guards(self.vectors, self._check_guards)
        self.sinks = open_sinks(engine.vllm_config, info)
        weakref.finalize(self, self.sinks.close)
        self.names = TakenNames(self.sinks)
        self._needs: dict[str, Need] = {}
        self._mm_prefix = bool(engine.vllm_config.model_config.is_mm_prefix_lm)
        has_cache = bool(engine.vllm_config.cache_config.enable_prefix_caching)
        self._row_reuse = RowReuse(config.reuse_bytes // share, has_cache, self.sinks.pace)
        self._reused: dict[str, ReusedRows] = {}  # by uid
        self.device_sources = DeviceSources(config.device_rows, info.shape.hidden_size)
        self._resolver = PlanResolver(info, engine, self.vectors.lookup)
        self.weights = WeightMemory(config.readout_bytes, self._is_used, self.forget_readings)
        self.lenses = LensRegistry(self.weights, info.shape)
        self.saes = SaeRegistry(self.weights, info.shape, config.reconstructed)
        self.vectors.saes = self.saes.source
        self.directions = DirectionCache(self.lenses, info.shape, engine)
        self.directions.outdated = self.forget_readings
        self._resolver.readings.registries = Registries(self.lenses, self.saes, self.directions)
        self.captures = ServerCaptures(self.sinks, info.shape, self._resolver.check_captures)
        self._deltas = deltas
        self._row_limits = [row_limit(workers, config, share) for workers in self._workers]
        budgets = [CapacityBudget(info.room, rows) for rows in self._row_limits]
        self._admission = Admission(budgets, busy)
        matrices = 4 * info.room.maps * info.shape.hidden_size**2
        make = partial(SentVectors, None, matrices, number, share)
        sent = self._sent_vectors = [make() for _ in self._workers]
        length = engine.vllm_config.model_config.max_model_len
        self.plans = RequestPlans(self._resolver, info.shape.num_layers, length)
        self.changes = PlanChanges(self._resolver, self._admission, sent)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for capacity."""
        return self._admission.waiting

    def before(self, call_plan: CallPlan) -> tuple[ServerWide, ...]:
        """Return the server-wide edits and probes, and the guards, that apply to a call."""
        return (*self.steering.plan_edits(), *call_plan.guards)

    def also(self, call_plan: CallPlan) -> tuple[Capture, ...]:
        """Return the server-wide captures that apply to a call."""
        return () if call_plan.is_own else self.captures.current

    def _check_guards(self, guards: tuple[Probe, ...]) -> None:
        """Check that requests can have these guards together, beside what is server-wide."""
        self._resolver.check_before((*self.steering.plan_edits(), *guards))

    def concerns(self, params: Any) -> bool:
        """Return whether server-wide edits or captures apply: they do to all that generates."""
        is_for_all = bool(self.steering.plan_edits()) or bool(self.captures)
        # Pooling requests have an output_kind as well, but no tokens to generate.
        return is_for_all and hasattr(params, "max_tokens")

    def forget_readings(self) -> None:
        """Forget what was computed from the model's weights, or from registered ones."""
        self._resolver.forget()
        self.directions.forget()

    def _is_used(self, weights: tuple[str, str]) -> bool:
        """Return whether a running request reads registered weights, (kind, name)."""
        return any(weights in need.weights for need in self._needs.values())

    def check_id(self, request_id: str) -> None:
        """Check that a request without a plan does not have the id of a running one with a plan."""

    def admit(self, request: Any, plan: Plan | CallPlan | None) -> AdmittedRequest | None:
        """Validate a request's plan and set its payload; None: nothing applies to it."""
        call_plan = plan if isinstance(plan, CallPlan) else CallPlan(plan)
        own = call_plan.plan
        if own is not None:
            self.sinks.check(own)
        before, also = self.before(call_plan), self.also(call_plan)
        prepared = self.plans.resolve(request, call_plan, before, also)
        if getattr(request, "resumable", False) and not prepared.is_empty:
            raise SpecError(
                "",
                "a session of streaming input can be captured or edited with generate() of "
                "midstream.AsyncLLM only",
            )
        if own is not None and own.captures and call_plan.most_bytes is not None:
            check_returned(prepared.returned_bytes(own, self.info.shape), call_plan.most_bytes)
        admitted = self._attach_payload(request, prepared, own, also, call_plan.client)
        if admitted is not None:
            others = before, also
            self.changes.add(
                admitted.uid, prepared.plan, request, call_plan, others, admitted.later
            )
        return admitted

    def _attach_payload(
        self,
        request: Any,
        prepared: PreparedPlan,
        own: Plan | None,
        also: tuple[Capture, ...],
        client: str = "",
    ) -> AdmittedRequest | None:
        """Attach the request payload of a prepared plan to its request; see `admit`."""
        if prepared.is_empty and own is None:
            set_payload(request, None)
            return None
        params = request.sampling_params
        kind = params.output_kind.name
        is_unsupported = kind == "DELTA" and not self._deltas
        if is_unsupported or (params.n > 1 and kind != "FINAL_ONLY"):
            raise SpecError(
                "",
                f"results come with the whole of a request's output, and output_kind={kind} with "
                f"n={params.n} never shows it; use FINAL_ONLY",
            )
        if own is not None:
            check_streams(own, kind, self._deltas)
        controller = None if prepared.control is None else prepared.control.name
        check_stop_strings(prepared.acts, controller, params.stop)
        single_need = prepared.need
        need = single_need.times(params.n)
        chosen = self._chosen_replica(request)
        limits = self._row_limits if chosen is None else [self._row_limits[chosen]]
        check_rows(need, max(limits, key=lambda limit: limit.limits.get(ROWS, 0)))
        uid = secrets.token_hex(16)
        routes = routes_of(prepared.plan, own, also, request.request_id, uid)
        reused = self._row_reuse.rows_of(request, prepared.plan, prepared.keys, own, also)
        if need.device_rows and params.n > 1:
            raise SpecError("capture", f'reduce="{ON_DEVICE}" is for n=1, and n is {params.n}')
        source = self.device_sources.begin(uid, need, prepared.plan, client)
        set_payload(request, prepared.payload(uid, self._mm_prefix))
        self._needs[uid] = need
        if reused is not None:
            self._reused[uid] = reused
        later = dict(prepared.later)
        media = spans_of(request) if getattr(request, "mm_features", None) else ()
        return AdmittedRequest(uid, prepared.plan, own, routes, reused, later, media, source)

    def _submit(self, request: Any, send: Callable[[], object]) -> None:
        uid = uid_of(request.sampling_params)
        if uid is None:
            send()
            return
        self.changes.submitted(uid, request.request_id)
        # With n > 1 the child requests have their parent's payload, and share its capacity by uid.
        self._submit_as(uid, request, send)

    def _submit_as(self, uid: str, request: Any, send: Callable[[], object]) -> None:
        """Submit a request that shares the capacity of this uid; see `_submit`."""
        need = self._needs.get(uid)
        if need is None:
            raise SpecError("", f"request {request.request_id!r} is not under way any more")
        self._admission.submit(uid, need, send, self._chosen_replica(request))

    @contextmanager
    def _with_vectors(self, request: Any) -> Iterator[None]:
        """Attach reused rows and, while it is sent, the vectors that workers lack; in order."""
        payload = payload_of(request.sampling_params)
        if payload is None:
            yield
            return
        reused = self._reused.get(payload.uid)
        if reused is not None:
            payload = msgspec.structs.replace(payload, kept=reused.find())
            set_payload(request, payload)
        sent = self._sent_vectors[self._admission.replica_of(payload.uid)]
        need = self._needs[payload.uid]
        update = sent.take(payload.uid, need.vectors)
        freed = self.device_sources.take_freed() if need.device_rows else ()
        if freed:
            update = msgspec.structs.replace(update or VectorUpdate((), ()), freed=freed)
        if update is None:
            yield
            return
        set_payload(request, msgspec.structs.replace(payload, vectors=update))
        try:
            yield
        except Exception:
            sent.lose(update)
            self.device_sources.lose(freed)
            raise
        finally:
            set_payload(request, payload)

    def _chosen_replica(self, request: Any) -> int | None:
        """Return the replica that the caller chose; None: no choice, or only one replica."""
        return None if len(self._workers) == 1 else request.data_parallel_rank

    def _release_tables(self, uids: list[str]) -> None:
        """Release what ended requests take on the workers, except for their rows."""
        self._release_vectors(uids)
        self._admission.end(uids)

    def _release(self, uids: list[str]) -> None:
        """Release all capacity of requests whose rows were fetched, or are not needed."""
        for uid in uids:
            self._needs.pop(uid, None)
            self._reused.pop(uid, None)
            self.device_sources.end(uid)
        self.changes.remove(uids)
        self.names.release(uids)
        self._release_vectors(uids)
        if uids:
            self._admission.finish(uids)

    def check_vectors(self, reports: Sequence[Sequence[IntegrityReport]]) -> None:
        """Check that the workers store the vectors that they are counted to store."""
        for sent, replica_reports in zip(self._sent_vectors, reports, strict=True):
            sent.check_integrity([report.vectors for report in replica_reports])

    def _release_vectors(self, uids: list[str]) -> None:
        for sent in self._sent_vectors:
            for uid in uids:
                sent.release(uid)


def _workers_of(info: EngineInfo) -> list[list[RemoteWorker]]:
    workers: list[list[RemoteWorker]] = [
        [] for _ in range(1 + max(w.replica for w in info.workers))
    ]
    for worker in info.workers:
        remote = RemoteWorker(worker, info.front_ends.number, info.front_ends.count)
        workers[worker.replica].append(remote)
    return workers


def set_payload(request: Any, payload: RequestPayload | None) -> None:
    """Put a payload, or none, into `extra_args`, replaced, as several requests may share them."""
    params = request.sampling_params
    rest = other_args(params)
    params.extra_args = (rest or None) if payload is None else {**rest, KEY: payload}


def check_streams(plan: Plan, kind: str, deltas: bool) -> None:
    """Check that there are outputs before the last, if a capture has `stream`."""
    if deltas and kind != "FINAL_ONLY":
        return
    why = f"with output_kind={kind} there is no output before the last; use CUMULATIVE or DELTA"
    if not deltas:
        why = "only generate() of midstream.AsyncLLM has outputs before the last"
    for index, capture in enumerate(plan.captures):
        if capture.stream:
            raise SpecError(f"capture[{index}].stream", why)


# Beneath vLLM's logger, which has handlers in every program that starts an engine.
_LOGGER = logging.getLogger("vllm.midstream")


def set_steering(vllm_config: Any, vectors: VectorRegistry, steering: Steering) -> None:
    """Register the vectors of the settings, then set the tiers."""
    settings = vllm_config.additional_config[KEY]
    if not isinstance(settings, Settings):
        return
    for name, path in settings.vectors.items():
        try:
            vectors.register(name, path)
        except SpecError as error:
            problem = str(error).removeprefix("vectors").lstrip(".: ")
            raise ConfigError(f"{KEY}.vectors.{name}: {problem}") from None
    if settings.steering:
        try:
            steering.set(**settings.steering)
        except SpecError as error:
            raise ConfigError(f"{KEY}.{error.under('steering')}") from None
        state = steering.show()
        _LOGGER.info(
            'midstream steering.started edits=%d digest="%s": every request is steered',
            len(state.edits),
            state.digest,
        )
