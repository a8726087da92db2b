"""Controllers with `mode="async"`: Python code beside an asynchronous engine.

An answer becomes an update when it is ready, and holds from the next position that is not scheduled
yet. Neither the engine nor another request ever waits for it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

from midstream.errors import BusyError, ControllerError, SpecError
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.plan_changes import PlanChanges
from midstream.runtime.protocol.acting_probes import check_stop_strings
from midstream.runtime.protocol.control import control_source
from midstream.spec import Plan
from midstream.spec.control_laws import Observed
from midstream.spec.controller import Controller, read_answer

_LOGGER = logging.getLogger(__name__)


class ControlledRequest:
    """A controller and one request. Call on the engine's event loop."""

    def __init__(
        self, controller: Controller, changes: PlanChanges, call_plan: CallPlan, request_id: str
    ) -> None:
        """Args:
        controller: the controller.
        changes: changes the plans of the engine's requests.
        call_plan: the request's plan.
        request_id: its id.
        """
        self._controller = controller
        assert not isinstance(controller.decide, str)
        self._decide = copy.copy(controller.decide)
        self._changes = changes
        self._call_plan = call_plan
        self._request_id = request_id
        self._seen: dict[str, int] = {}
        self._scale = 1.0
        self._is_over = False  # it is not called again
        self._failure: ControllerError | None = None
        self._task: asyncio.Task[None] | None = None

    def observe(self, output: Any, tokens: int) -> None:
        """Give the controller the new scores of an output, unless it still computes.

        Args:
            output: vLLM's RequestOutput, with `probes` and `activations`.
            tokens: number of tokens generated so far.

        Raises:
            ControllerError: it failed, and the request is to end then.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_over or output.finished or (self._task is not None and not self._task.done()):
            return
        probes = output.outputs[0].probes or {}
        scores = {name: found[self._seen.get(name, 0) :].clone() for name, found in probes.items()}
        if not any(map(len, scores.values())):
            return
        self._seen = {name: len(found) for name, found in probes.items()}
        observed = Observed(self._request_id, tokens, scores, output.outputs[0].activations)
        self._task = asyncio.create_task(self._run(observed), name="midstream controller")

    def close(self) -> None:
        """Forget what it is computing: the request has ended."""
        self._is_over = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self, observed: Observed) -> None:
        try:
            answer = await asyncio.wait_for(
                _in_thread(self._decide, observed), self._controller.seconds
            )
            await self._change(read_answer(answer))
        except Exception as error:  # noqa: BLE001 - whatever it is, the policy decides
            if not self._is_over:
                await self._fail(error)

    async def _change(self, change: dict[str, Any]) -> None:
        if not change or (change.get("scale") == self._scale and "edits" not in change):
            return
        edits, scale = change.get("edits"), change.get("scale")
        source = control_source(self._controller.name)
        try:
            if "stop" in change:
                await self._changes.stop_later(self._call_plan, source)
                self._is_over = True
                return
            await self._changes.update_later(self._call_plan, edits, scale, source)
        except BusyError:
            return  # it will be called again
        except SpecError as error:
            if error.path == "request_id":
                return  # the request has ended meanwhile
            raise
        self._scale = 1.0 if scale is None else scale

    async def _fail(self, error: Exception) -> None:
        self._is_over = True
        what = "took too long" if isinstance(error, asyncio.TimeoutError) else repr(error)
        problem = (
            f"controller {self._controller.name!r} of request {self._request_id!r} failed: {what}"
        )
        if self._controller.on_error == "end":
            self._failure = ControllerError(problem)
            return
        _LOGGER.warning("%s; its policy is %s", problem, self._controller.on_error or "keep")
        if self._controller.on_error == "off":
            await self._change({"edits": []})


def check_controlled(plan: Plan | None, params: Any, controller: Controller) -> None:
    """Check that a request has outputs with scores before its last, and edits that can change.

    Args:
        plan: the request's own plan.
        params: vLLM's SamplingParams.
        controller: its controller in `mode="async"`.

    Raises:
        SpecError: it has not.
    """
    if plan is None or not plan.probes:
        raise SpecError("controller", "it reads scores: give the request `probes`")
    if plan.controller is not None:
        raise SpecError("controller", "the request has a controller in the engine core already")
    if plan.switches:
        raise SpecError("controller", "the probes of the request switch its edits (Switch) already")
    if params.n > 1 or params.output_kind.name == "FINAL_ONLY":
        raise SpecError(
            "controller",
            "it reads scores while the request runs: use n=1 and an output_kind of CUMULATIVE or "
            "DELTA",
        )
    if params.output_kind.name == "DELTA" and any(one.stream for one in plan.captures):
        raise SpecError(
            "controller",
            "it is given all rows so far, and with DELTA an output has the new ones only; use "
            "output_kind=CUMULATIVE, or a capture without `stream`",
        )
    check_stop_strings((), controller.name, params.stop)


async def _in_thread(decide: Callable[[Observed], Any], observed: Observed) -> Any:
    """Return what a function returns in a thread of its own, which may never end."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[Any] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not found.done():
            method(value)

    def run() -> None:
        try:
            value = decide(observed)
        except BaseException as error:  # noqa: BLE001 - the thread ends with it
            done = found.set_exception, RuntimeError(repr(error))
        else:
            done = found.set_result, value
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, *done)

    threading.Thread(target=run, name="midstream controller", daemon=True).start()
    return await found
