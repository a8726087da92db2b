"""Controllers with `mode="async"` beside an asynchronous engine: answers become updates."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from midstream.deadlines import within
from midstream.errors import ControllerError, SpecError
from midstream.plan import Plan
from midstream.plan.control.controller import Answer, Controller
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.controller_run import ControllerRun, check_beside
from midstream.runtime.frontend.request.plan_changes import PlanChanges


class ControlledRequest:
    """A controller and one request. Call on the engine's event loop."""

    def __init__(
        self, controller: Controller, changes: PlanChanges, call_plan: CallPlan, request_id: str
    ) -> None:
        self._controlled = ControllerRun(controller, request_id)
        self._changes = changes
        self._call_plan = call_plan
        self._failure: ControllerError | None = None
        self._task: asyncio.Task[None] | None = None

    def observe(self, output: Any, tokens: int) -> None:
        """Give the controller the new scores of an output, unless it still computes."""
        if self._failure is not None:
            raise self._failure
        is_busy = self._task is not None and not self._task.done()
        if self._controlled.is_over or output.finished or is_busy:
            return
        completion = output.outputs[0]
        call = self._controlled.begin(completion.probes, tokens, completion.activations)
        if call is not None:
            self._task = asyncio.create_task(self._finish(call), name="midstream controller")

    def close(self) -> None:
        """Forget what it is computing: the request has ended."""
        self._controlled.is_over = True
        if self._task is not None:
            self._task.cancel()

    async def _finish(self, call: Future[Answer]) -> None:
        seconds = self._controlled.controller.seconds
        try:
            answer = await within(seconds, asyncio.wrap_future(call))
            await self._change(self._controlled.asked(answer))
        except Exception as error:  # noqa: BLE001 - whatever it is, the policy decides
            if not self._controlled.is_over:
                is_late = isinstance(error, asyncio.TimeoutError)
                await self._fail("took too long" if is_late else repr(error))

    async def _change(self, asked: Mapping[str, Any]) -> None:
        if not asked:
            return
        source = self._controlled.source
        with self._controlled.changing(asked):
            if "stop" in asked:
                await self._changes.stop_later(self._call_plan, source)
            else:
                edits, scale = asked.get("edits"), asked.get("scale")
                await self._changes.update_later(self._call_plan, edits, scale, source)

    async def _fail(self, what: str) -> None:
        problem = self._controlled.fail(what)
        if problem is not None:
            self._failure = ControllerError(problem)
        elif self._controlled.turns_off:
            with suppress(SpecError):  # it has no edits
                await self._change({"scale": 0.0})


def check_controlled(plan: Plan | None, params: Any, controller: Controller) -> None:
    """Check that a request has outputs with scores before its last, and edits that can change."""
    check_beside(plan, params, controller)
    assert plan is not None
    if params.output_kind.name == "FINAL_ONLY":
        raise SpecError(
            "controller",
            "it reads scores while the request runs: use an output_kind of CUMULATIVE or DELTA",
        )
    if params.output_kind.name == "DELTA" and any(capture.stream for capture in plan.captures):
        raise SpecError(
            "controller",
            "it is given all rows so far, and with DELTA an output has the new ones only; use "
            "output_kind=CUMULATIVE, or a capture without `stream`",
        )
