"""Controllers with `mode="async"` of an engine that its caller steps: called between its steps."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from midstream.errors import SpecError
from midstream.plan import ResolvedPlan
from midstream.plan.control.controller import Answer
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.controller_run import ControllerRun
from midstream.runtime.frontend.request.plan_changes import PlanChanges
from midstream.runtime.frontend.results.partial_scores import StreamState
from midstream.runtime.frontend.rpc.fetch import Call, scores_by_uid
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.rpc import ReadScores
from midstream.runtime.protocol.scores import Span


@dataclass(slots=True, eq=False)
class _Controlled:
    run: ControllerRun
    call_plan: CallPlan
    stream: StreamState
    prompt_len: int  # tokens
    call: Future[Answer] | None = None  # that is under way
    begun: float = 0.0


class StepControllers:
    """The controllers of the running requests of one engine."""

    def __init__(self, changes: PlanChanges, workers: Sequence[RemoteWorker], call: Call) -> None:
        self._changes = changes
        self._workers = workers
        self._call = call
        self._running: dict[str, _Controlled] = {}

    def add(self, uid: str, call_plan: CallPlan, plan: ResolvedPlan, request: Any) -> None:
        if call_plan.controller is not None:
            prompt = request.prompt_token_ids or [0] * plan.prompt_len
            run = ControllerRun(call_plan.controller, request.request_id)
            stream = StreamState(plan, prompt)
            self._running[uid] = _Controlled(run, call_plan, stream, len(prompt))

    def end(self, uids: Iterable[str]) -> None:
        """Forget requests that have ended, with what their controllers are computing."""
        for uid in uids:
            self._running.pop(uid, None)

    def step(self, states: Mapping[str, Any], ended: Iterable[str] = ()) -> None:
        """Do what has been answered, and call controllers with new scores, by vLLM's `states`."""
        self.end(ended)
        spans: dict[str, Span] = {}
        for uid, controlled in self._running.items():
            self._finish_call(controlled)
            if controlled.call is not None or controlled.run.is_over:
                continue
            state = next(
                (states[name] for name in self._changes.ids_of(uid) if name in states), None
            )
            tokens = [] if state is None else state.detokenizer.output_token_ids
            if tokens:  # before the first, not all of the prompt was computed
                known = SimpleNamespace(token_ids=tokens)
                controlled.stream.record(known, is_delta=False)
                span = controlled.stream.next_span()
                if span is not None:
                    spans[uid] = span
        if not spans:
            return
        answers = self._call(ReadScores(spans))
        for uid, blocks in scores_by_uid(self._workers, spans, answers).items():
            controlled = self._running[uid]
            controlled.stream.add(blocks)
            generated = len(controlled.stream.tokens) - controlled.prompt_len
            controlled.begun = time.monotonic()
            controlled.call = controlled.run.begin(controlled.stream.probes(), generated)

    def _finish_call(self, controlled: _Controlled) -> None:
        if controlled.call is None:
            return
        if not controlled.call.done():
            if time.monotonic() - controlled.begun > controlled.run.controller.seconds:
                self._fail(controlled, "took too long")
            return
        call, controlled.call = controlled.call, None
        try:
            self._change(controlled, controlled.run.asked(call.result()))
        except Exception as error:  # noqa: BLE001 - whatever it is, the policy decides
            self._fail(controlled, repr(error))

    def _change(self, controlled: _Controlled, asked: Mapping[str, Any], problem: str = "") -> None:
        if not asked:
            return
        with controlled.run.changing(asked):
            if "stop" in asked:
                self._changes.stop(
                    controlled.call_plan, problem or controlled.run.source, bool(problem)
                )
            else:
                edits, scale = asked.get("edits"), asked.get("scale")
                self._changes.update(controlled.call_plan, edits, scale, controlled.run.source)

    def _fail(self, controlled: _Controlled, what: str) -> None:
        controlled.call = None
        problem = controlled.run.fail(what)
        if problem is not None:
            self._change(controlled, {"stop": True}, problem)
        elif controlled.run.turns_off:
            with suppress(SpecError):  # it has no edits
                self._change(controlled, {"scale": 0.0})
