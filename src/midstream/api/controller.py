"""Controllers with `mode="async"`: Python code beside an asynchronous engine.

An answer becomes an update when it is ready, and holds from the next position that is not scheduled
yet. Neither the engine nor another request ever waits for it.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from midstream.errors import BusyError, ControllerError, SpecError
from midstream.runtime.frontend.request.call_plan import CallPlan
from midstream.runtime.frontend.request.plan_changes import PlanChanges
from midstream.spec import Plan
from midstream.spec.control_laws import Observed
from midstream.spec.controller import Controller
from midstream.validation import read_float32, show

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
        self._failed = False
        self._failure: ControllerError | None = None
        self._task: asyncio.Task[None] | None = None

    def observe(self, output: Any, tokens: int) -> None:
        """Give the controller the new scores of an output, unless it still computes.

        Args:
            output: vLLM's RequestOutput, with `probes`.
            tokens: number of tokens generated so far.

        Raises:
            ControllerError: it failed, and the request is to end then.
        """
        if self._failure is not None:
            raise self._failure
        if self._failed or output.finished or (self._task is not None and not self._task.done()):
            return
        probes = output.outputs[0].probes or {}
        scores = {name: found[self._seen.get(name, 0) :].clone() for name, found in probes.items()}
        if not any(map(len, scores.values())):
            return
        self._seen = {name: len(found) for name, found in probes.items()}
        observed = Observed(self._request_id, tokens, scores)
        self._task = asyncio.create_task(self._run(observed), name="midstream controller")

    def close(self) -> None:
        """Forget what it is computing: the request has ended."""
        self._failed = True
        if self._task is not None:
            self._task.cancel()

    async def _run(self, observed: Observed) -> None:
        try:
            answer = await asyncio.wait_for(
                _in_thread(self._decide, observed), self._controller.seconds
            )
            await self._change(_read(answer))
        except Exception as error:  # noqa: BLE001 - whatever it is, the policy decides
            if not self._failed:
                await self._fail(error)

    async def _change(self, change: dict[str, Any]) -> None:
        if not change or (change.get("scale") == self._scale and "edits" not in change):
            return
        edits, scale = change.get("edits"), change.get("scale")
        source = f"controller:{self._controller.name}"
        try:
            await self._changes.update_later(self._call_plan, edits, scale, source)
        except BusyError:
            return  # it will be called again
        except SpecError as error:
            if error.path == "request_id":
                return  # the request has ended meanwhile
            raise
        self._scale = 1.0 if scale is None else scale

    async def _fail(self, error: Exception) -> None:
        self._failed = True
        what = "took too long" if isinstance(error, asyncio.TimeoutError) else repr(error)
        problem = (
            f"controller {self._controller.name!r} of request {self._request_id!r} failed: {what}"
        )
        if self._controller.on_error == "end":
            self._failure = ControllerError(problem)
            return
        _LOGGER.warning("%s; its policy is %s", problem, self._controller.on_error)
        if self._controller.on_error == "off":
            await self._change({"edits": []})


def check_controlled(plan: Plan | None, params: Any) -> None:
    """Check that a request has outputs with scores before its last, and edits that can change.

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


def _read(answer: object) -> dict[str, Any]:
    """Return the arguments of the update that an answer asks for.

    Raises:
        SpecError: it is no answer.
    """
    if answer is None:
        return {}
    if isinstance(answer, Mapping):
        if not set(answer) <= {"scale", "edits"}:
            raise SpecError(
                "", f"expected `scale` and `edits`, got {show(str(sorted(map(str, answer))))}"
            )
        return dict(answer)
    return {"scale": read_float32(answer)}


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
