"""State of one server: its engine, limits, cached captures and metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from msgspec import structs
from starlette.datastructures import Headers
from starlette.types import Scope

from midstream.config.config import KEY
from midstream.config.http import HttpSettings
from midstream.config.server_folder import own_folder, remove_if_left
from midstream.errors import HttpError, SpecError
from midstream.plan import Plan
from midstream.plan.captured_rows import OpenRows
from midstream.plan.operations import has_captured
from midstream.plan.plan import beams_problem
from midstream.plan.positions.work import check_called
from midstream.plan.tap_lookup import size_of
from midstream.runtime.frontend.request.call_plan import (
    CallPlan,
    plan_of,
    with_plan,
    without_plan,
)
from midstream.runtime.frontend.results.sink_setup import origin_of
from midstream.server import audit_log, metrics
from midstream.server.body_values import completions_of, prompts_of
from midstream.server.cached_rows.capture_cache import CachedCapture, CaptureCache, expire_in_time
from midstream.server.cached_rows.patched_rows import opened_rows
from midstream.server.guards.guard_event import GuardEvent
from midstream.server.guards.guarded_calls import BEAMS, GuardedCalls, is_of_beams
from midstream.server.http_request import RequestContext
from midstream.server.open_requests import OpenRequests
from midstream.server.peers import Peers
from midstream.server.request_field import MidstreamField
from midstream.server.results_json import ResultEncoder
from midstream.server.running_requests import RunningCall, RunningRequests
from midstream.server.sweep_pace import SweepPace
from midstream.sinks.events import EventLog
from midstream.steering.edit_forms import TIERS
from midstream.steering.guard_definition import Webhook, fingerprint
from midstream.steering.shared_folder import SharedFolder
from midstream.steering.tiers import SteeringState
from midstream.validation import at
from midstream.version import __version__

# vLLM's endpoints whose responses can include results.
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
# midstream's own, which computes like these.
SWEEP = "/v1/midstream/sweep"
# Fields of a chat request that are arguments of its template.
_TEMPLATE = ("chat_template", "chat_template_kwargs", "add_generation_prompt",
             "continue_final_message", "tools")  # fmt: skip
# Time that the workers have to report their usage; else their last reports are shown.
_USAGE_SECONDS = 2.0
# Characters of a path, and of a request's id, in the log.
_PATH_SHOWN, _ID_SHOWN = 200, 128


class Server:
    """State that middleware and routes share."""

    def __init__(
        self,
        settings: HttpSettings,
        *,
        admin: bool,  # whether vectors and steering can be changed over HTTP
        has_key: bool,  # whether vLLM checks an API key before
        check_host: Callable[[Mapping[str, str]], None],  # raises HttpError
        events: EventLog | None = None,  # where events of guards go; None: to the log alone
    ) -> None:
        self.settings = settings
        self.has_key = has_key
        self.check_host = check_host
        self.metrics = metrics.process_metrics()
        self.events = EventLog({}) if events is None else events
        self._admin = admin
        self.captures = CaptureCache(settings)
        self.parameter_lock = asyncio.Lock()  # held by the client that is sent a parameter
        self.started = time.time()
        self._llm: Any = None
        self._expiry: asyncio.Task[None] | None = None
        self._shared: SharedFolder | None = None  # vectors and steering of several processes
        self.peers: Peers | None = None  # the other API server processes
        self.answers: ResultEncoder  # from `start` on, as nothing is accepted before
        self.template: dict[str, Any] = {}  # arguments of chat templates from the settings
        self.open_requests = OpenRequests()
        self.running = RunningRequests()
        self.sweeps = SweepPace(settings.running_sweeps, settings.sweep_wait_seconds)
        self.guards = GuardedCalls(self.metrics, self._publish)

    async def start(self, llm: Any, template: Mapping[str, Any]) -> None:
        """Connect the engine; `template`: arguments of chat templates from the settings."""
        await llm.ready()
        info = llm.info
        dtype: torch.dtype = getattr(torch, info.dtype)
        self.answers = ResultEncoder(self.settings, self.captures, info.shape.hidden_size, dtype)
        self.template = {name: value for name, value in template.items() if value is not None}
        limits = self.settings
        observe = partial(_observe_wait, self.metrics)
        llm.intake.limit(limits.waiting_requests, limits.wait_seconds, observe)
        audit_log.attach_handlers(limits.log)
        shared = limits.shared_folder
        if info.front_ends.count > 1:
            own = own_folder()
            self.peers, shared = Peers(own, info.front_ends), shared or str(own / "state")
        if shared is not None:
            self._shared = SharedFolder(shared, llm.vectors, llm.steering, llm.guards)
        self._llm = llm
        self._expiry = asyncio.create_task(expire_in_time(self.captures))
        audit_log.log_event("ready", version=__version__, taps=len(info.shape.taps))
        # Override the method on this instance only: the calls of an HTTP request get its plan.
        generate = llm.generate
        self.guards.connect(llm, generate)
        llm.generate = lambda *args, **named: self._generate(generate, *args, **named)

    @property
    def llm(self) -> Any:
        if self._llm is None:
            raise HttpError(503, "the engine is not ready yet")
        return self._llm

    @property
    def is_ready(self) -> bool:
        """Whether requests with a plan are accepted: the engine is set up and not shutting down."""
        llm = self._llm
        return llm is not None and not llm.errored and not llm.intake.is_closed

    @property
    def steering(self) -> str | None:
        """Epoch of server-wide steering, and digest, which a restart keeps; None: there is none."""
        if self._llm is None or not self._llm.steering.plan_edits():
            return None
        return f"epoch={self._llm.steering.epoch}, digest={self._llm.steering.digest[:16]}"

    def owns(self, scope: Scope, cached: CachedCapture) -> bool:
        """Return whether rows are those of a request's client; without keys, all may use an id."""
        return not self.has_key or cached.client == self.client_of(scope)

    def client_of(self, scope: Scope) -> str:
        """Return the id of a request's client: a hash of its API key, else its address."""
        if self.has_key:
            # Ignore the scheme before the key, whose case and spelling vary.
            _, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            return fingerprint(key)
        client = scope.get("client")
        return client[0] if client else ""

    async def fill(self, scope: Scope, request_field: MidstreamField) -> MidstreamField:
        """Return the field of a request with the cached rows that its edits refer to."""
        plan = request_field.plan
        if plan is None or not any(map(has_captured, plan.edits)):
            return request_field
        shape = self.llm.info.shape

        def filled() -> Plan:
            with rows_for(self, scope) as open_rows:
                return plan.fill(open_rows, shape)

        try:
            return replace(request_field, plan=await asyncio.to_thread(filled))
        except SpecError as error:
            raise request_field.explain(error) from None

    def begin(
        self, scope: Scope, body: Mapping[str, Any], request_field: MidstreamField
    ) -> RequestContext:
        layers = self.llm.info.shape.num_layers  # raises 503 until the engine is ready
        client = self.client_of(scope)
        plan = request_field.plan
        if plan is not None and (count := prompts_of(body)) > 1:
            with at("prompt"):
                parts = (*plan.captures, *plan.edits, *plan.probes)
                check_called(count, size_of(parts, layers))
        context = RequestContext(request_field, client)
        if plan is not None and plan.captures and request_field.activations == "handle":
            context.reservation = self.captures.reserve(client, completions_of(body))
        context.messages = body.get("messages")
        if context.messages is not None:
            own = {name: body[name] for name in _TEMPLATE if body.get(name) is not None}
            context.template = {**self.template, **own}
        return context

    async def state(self) -> dict[str, Any]:
        """Return versions, settings, usage and totals as JSON values."""
        llm = self.llm
        info = llm.info
        return {
            **asdict(origin_of(llm.vllm_config, info)),
            "codec": info.codec,
            "taps": len(info.shape.taps),
            "runner": info.workers[0].runner,
            "uptime_seconds": time.time() - self.started,
            "admin": self._admin,
            "process": asdict(info.front_ends),
            "steering": _count(llm.steering.show()),
            "vectors": len(llm.vectors),
            "vector_names": [registered.name for registered in llm.vectors.list()],
            "shared_changes": None if self._shared is None else self._shared.version,
            "lens_names": list(llm.lenses.names),
            "sae_names": list(llm.saes.names),
            "held": {"captures": len(self.captures), "bytes": self.captures.nbytes},
            "events": {name: asdict(counts) for name, counts in self.events.counts.items()},
            "limits": structs.asdict(self.settings),
            **await llm.usage(_USAGE_SECONDS),
        }

    async def refresh_metrics(self, scope: Scope) -> None:
        """Update the metrics, if the engine is ready; in other processes too."""
        if self._llm is not None and not self._llm.errored:
            self.metrics.drift.keep(guard.name for guard in self._llm.guards.active())
            await self.metrics.refresh(self.state)
        if self.peers is not None:
            await self.peers.refresh_metrics(scope)

    def record_refusal(self, scope: Scope, status: int, param: str | None) -> None:
        self.metrics.count_refusal(status)
        audit_log.log_event(
            "request.refused",
            status=status,
            method=scope["method"],
            path=scope["path"][:_PATH_SHOWN],
            client=self.client_of(scope),
            request_id=Headers(scope=scope).get("x-request-id", "")[:_ID_SHOWN] or None,
            param=param,
        )

    def _publish(self, event: GuardEvent, webhook: Webhook | None) -> None:
        """Give an event of a guard to the sinks, and to its own webhook."""
        own = None if webhook is None else (event.guard, webhook.url, webhook.seconds)
        self.events.put(event.to_dict(), own)

    def close(self) -> None:
        """Free all cached captures, and send the events that wait. The engine closes its sinks."""
        audit_log.log_event("closing", held_captures=len(self.captures))
        if self._expiry is not None:
            self._expiry.cancel()
        self.captures.close()
        self.events.close()
        if self.peers is not None:
            self.peers.close()
            remove_if_left()

    def _generate(
        self, generate: Any, prompt: Any, params: Any, request_id: str, **named: Any
    ) -> AsyncGenerator[Any, None]:
        context = self.open_requests.find(params)
        if context is None and (asked := plan_of(params)) is not None:
            foreign = asked.coming_from if isinstance(asked, Plan) else ()
            raise SpecError(
                f"extra_args.{foreign[0][0] if foreign else KEY}",
                f"this endpoint cannot return results; use {', '.join(PATHS)} and the body's field "
                f"{KEY}",
            )
        if is_of_beams(request_id, params):
            llm = self.llm
            problem = beams_problem((*llm.steering.plan_edits(), *llm.captures.current))
            if problem is not None:
                raise SpecError(BEAMS, problem)
        guarded = self.guards.begin(request_id, params, named.get("lora_request"))
        guards = () if guarded is None else guarded.probes
        if context is None:
            if guarded is not None:
                params = with_plan(params, CallPlan(None, guards=guards))
            stream: AsyncGenerator[Any, None] = generate(prompt, params, request_id, **named)
            return stream if guarded is None else guarded.watch(stream, prompt)
        plan = context.request_field.plan
        running: AbstractContextManager[None] = nullcontext()
        if plan is None:
            params = without_plan(params)
            if guards:
                params = with_plan(params, CallPlan(None, guards=guards))
        else:
            own = context.call_plan(self.settings, guards)
            # vLLM gives the calls of other requests numbers, also if there is only one.
            is_numbered, first = context.messages is None, context.calls * params.n
            call = RunningCall(context, request_id, context.client, own, first, is_numbered)
            running = self.running.running(call)
            params = with_plan(params, own)
        stream = generate(prompt, params, request_id, **named)
        if guarded is not None:
            stream = guarded.watch(stream, prompt, plan is not None)
        return context.track(stream, params.n, running)


def rows_for(server: Server, scope: Scope) -> AbstractContextManager[OpenRows]:
    """Return the context of what opens cached rows. Not on the event loop: it may ask peers."""
    elsewhere = None if server.peers is None else partial(server.peers.read_rows, scope)
    owns, most = partial(server.owns, scope), server.settings.max_body_bytes
    return opened_rows(server.captures, server.client_of(scope), owns, most, elsewhere)


def record_steering(state: SteeringState) -> None:
    audit_log.log_event("steering.changed", **_count(state))


def _observe_wait(counts: metrics.Metrics, request_id: str, seconds: float | None) -> None:
    """Log that a request waits for capacity, or for how long it did."""
    name = request_id[:_ID_SHOWN]
    if seconds is None:
        audit_log.log_event("request.waiting", request_id=name)
        return
    counts.observe_wait(seconds)
    audit_log.log_event("request.waited", request_id=name, seconds=round(seconds, 3))


def _count(state: SteeringState) -> dict[str, Any]:
    edits = {tier: len(getattr(state, tier)) for tier in TIERS}
    return {"epoch": state.epoch, "digest": state.digest, **edits}
