"""The front door of one engine: what a request asks for is checked there, and waits there for room.

How results come back to their callers differs: see `frontend` and `async_frontend`.
"""

from __future__ import annotations

import copy
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from midstream.config.config import KEY, from_additional_config
from midstream.errors import SpecError
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.engine_info import EngineInfo
from midstream.runtime.frontend.request.admission import Admission
from midstream.runtime.frontend.request.budget import Budget, Need, check_rows, row_room
from midstream.runtime.frontend.request.plan_resolver import PlanResolver, Ready
from midstream.runtime.frontend.request.prompt.chat import ChatPlan
from midstream.runtime.frontend.request.sink_routes import routes_of
from midstream.runtime.frontend.results.sink_setup import open_sinks
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.request_payload import RequestPayload, uid_of
from midstream.spec import Plan, ResolvedPlan
from midstream.steering import VectorRegistry
from midstream.steering.tiers import Steering


class BaseFrontEnd:
    """One engine's front door."""

    def __init__(
        self,
        info: EngineInfo,
        engine: Any,
        deltas: bool,
        busy: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Args:
        info: what the workers said of themselves.
        engine: gives the settings, the tokenizer and the renderer.
        deltas: whether outputs may show only what is new; whoever returns results puts them
            together then.
        busy: how many requests each replica has, see `Admission`.
        """
        found = from_additional_config(engine.vllm_config.additional_config)
        assert found is not None
        self._config = found
        self.info = info
        self._vectors = (info.shape.hidden_size, getattr(torch, info.dtype))
        replicas = 1 + max(description["replica"] for description in info.workers)
        self._workers: list[list[RemoteWorker]] = [[] for _ in range(replicas)]  # of each replica
        for description in info.workers:
            self._workers[description["replica"]].append(RemoteWorker(description))
        self.vectors = VectorRegistry(info.shape)
        self.steering = Steering(self.vectors)
        self.sinks = open_sinks(engine.vllm_config, info)
        weakref.finalize(self, self.sinks.close)
        self._asking = PlanResolver(info, engine, self.sinks.captures)
        self._asking.check_also()
        self._deltas = deltas
        self._row_rooms = [row_room(workers, found) for workers in self._workers]
        budgets = [Budget(info.room, rows) for rows in self._row_rooms]
        self._admission = Admission(budgets, busy)
        self._needs: dict[str, Need] = {}

    def concerns(self, params: Any) -> bool:
        """Whether server-wide edits or captures apply to a request: to all that generate."""
        # Pooling requests have an output_kind as well, but no tokens to generate.
        is_for_all = bool(self.steering.plan_edits()) or bool(self.sinks.captures)
        return is_for_all and hasattr(params, "max_tokens")

    def check_id(self, request_id: str) -> None:
        """A request that asks for nothing comes by; results of others must not be taken for its
        own.

        Raises:
            SpecError: its id is that of a request which asks for something.
        """

    def admit(self, request: Any, asked_for: Any) -> AdmittedRequest | None:
        """Checks a processed request's plan and lets it ride; the caller's params stay as they are.

        Args:
            request: vLLM's EngineCoreRequest, whose sampling params are its own copy.
            asked_for: a Plan, a ChatPlan, or None; the server-wide edits come before its own, the
                server-wide captures after them.

        Returns:
            What the request asks for; None when that comes to nothing.

        Raises:
            SpecError: the request cannot be served as asked.
        """
        own = asked_for.plan if isinstance(asked_for, ChatPlan) else asked_for
        if own is not None:
            self.sinks.check(own)
        ready = self._asking.resolve(
            asked_for, self.steering.plan_edits(), self.vectors.lookup, request
        )
        if getattr(request, "resumable", False) and asks(ready[0]):
            raise SpecError(
                "",
                "a session of streaming input can be captured or edited with generate() of "
                "midstream.AsyncLLM only",
            )
        return self._let_ride(request, ready, own)

    def _let_ride(self, request: Any, ready: Ready, own: Plan | None) -> AdmittedRequest | None:
        """Puts what was made of a request's own plan on it; returns what it asks for, if anything.

        Raises:
            SpecError: its output would never show all of it.
        """
        resolved, need, packed, keys = ready
        if not asks(resolved):
            set_payload(request, None)
            return None
        params = request.sampling_params
        kind = params.output_kind.name
        refused = kind == "DELTA" and not self._deltas
        if refused or (params.n > 1 and kind != "FINAL_ONLY"):
            raise SpecError(
                "",
                f"results come with the whole of a request's output, and output_kind={kind} with "
                f"n={params.n} never shows it; use FINAL_ONLY",
            )
        if own is not None:
            self._check_streams(own, kind)
        need = replace(need, rows=need.rows * params.n)
        only = self._only(request)
        rooms = self._row_rooms if only is None else [self._row_rooms[only]]
        check_rows(need, max(rooms, key=lambda room: room.limit or 0))
        uid = uuid.uuid4().hex
        routes = routes_of(resolved, own, self.sinks.captures, request.request_id, uid)
        asked = AdmittedRequest(uid, resolved, own, routes)
        set_payload(request, RequestPayload(asked.uid, packed, keys).pack())
        self._needs[asked.uid] = need
        return asked

    def _check_streams(self, plan: Plan, kind: str) -> None:
        """Whether rows can be shown on the way by those captures that ask for it.

        Raises:
            SpecError: they cannot.
        """
        if self._deltas and kind != "FINAL_ONLY":
            return
        why = f"with output_kind={kind} there is no output before the last; use CUMULATIVE or DELTA"
        if not self._deltas:
            why = "only generate() of midstream.AsyncLLM has outputs before the last"
        for nth, capture in enumerate(plan.captures):
            if capture.stream:
                raise SpecError(f"capture[{nth}].stream", why)

    def _submit(self, request: Any, go: Callable[[], object]) -> None:
        """Lets a request go to the engine, when there is room for what it asks for.

        Raises:
            SpecError: it is not under way any more.
        """
        uid = uid_of(request.sampling_params)
        if uid is None:
            go()
            return
        # With n > 1 the children carry their parent's uid, and it is by that that they share.
        self._queue(uid, request, go)

    def _queue(self, uid: str, request: Any, go: Callable[[], object]) -> None:
        """As `_submit`, for a request that shares the room of this uid."""
        need = self._needs.get(uid)
        if need is None:
            raise SpecError("", f"request {request.request_id!r} is not under way any more")
        self._admission.submit(uid, need, go, self._only(request))

    def _only(self, request: Any) -> int | None:
        """The replica that a request's caller chose; None: none, or there is but one."""
        return None if len(self._workers) == 1 else request.data_parallel_rank

    def _end(self, uids: list[str]) -> None:
        """These requests have ended, and their rows are still to be fetched."""
        self._admission.end(uids)

    def _came(self, uid: str, nbytes: int) -> None:
        """Rows of a request that goes on have been fetched: others may have their room."""
        self._admission.give_back_rows(uid, nbytes)

    def _leave(self, uids: list[str]) -> None:
        """These requests need their room no more: their rows were fetched, or nobody wants them."""
        for uid in uids:
            self._needs.pop(uid, None)
        if uids:
            self._admission.finish(uids)


def asks(plan: ResolvedPlan) -> bool:
    """Whether a plan comes to anything."""
    return bool(plan.edits or plan.captures or plan.probes)


def set_payload(request: Any, riding: list[object] | None) -> None:
    """Gives a request what it carries; None: nothing. Its params were its own copy, and are not
    changed: vLLM shares them between some requests.
    """
    params = copy.copy(request.sampling_params)
    rest = {name: value for name, value in (params.extra_args or {}).items() if name != KEY}
    params.extra_args = (rest or None) if riding is None else {**rest, KEY: riding}
    request.sampling_params = params
