"""A controller with `mode="async"` and one request. Nothing waits for its calls, in threads."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from midstream.errors import BusyError, SpecError
from midstream.plan import Plan
from midstream.plan.control.control_laws import Observed
from midstream.plan.control.controller import Answer, Controller, read_answer
from midstream.plan.plan import check_law
from midstream.runtime.protocol.acting_probes import check_stop_strings
from midstream.runtime.protocol.control import control_source

_LOGGER = logging.getLogger(__name__)


class ControllerRun:
    """A controller and one request."""

    def __init__(self, controller: Controller, request_id: str) -> None:
        assert not isinstance(controller.decide, str)
        self.controller = controller
        self.source = control_source(controller.name)  # of its versions, and its stop reason
        self.is_over = False  # it is not called again
        self._decide = copy.copy(controller.decide)
        self._request_id = request_id
        self._seen: dict[str, int] = {}
        self._scale = 1.0

    def begin(
        self, probes: Mapping[str, Tensor] | None, tokens: int, rows: Any = None
    ) -> Future[Answer] | None:
        """Begin a call with those of all scores that it was not given yet; None: there are none."""
        probes = probes or {}
        scores = {
            name: values[self._seen.get(name, 0) :].clone() for name, values in probes.items()
        }
        if not any(map(len, scores.values())):
            return None
        self._seen = {name: len(values) for name, values in probes.items()}
        return self._in_thread(Observed(self._request_id, tokens, scores, rows))

    def asked(self, answer: Answer) -> dict[str, Any]:
        """Return what an answer asks for, as `read_answer`; nothing if that holds already."""
        fields = read_answer(answer)
        return {} if fields == {"scale": self._scale} else fields

    @contextmanager
    def changing(self, asked: Mapping[str, Any]) -> Iterator[None]:
        """Record what an answer asked for, once the block has done it. A late one is no error."""
        try:
            yield
        except BusyError:
            return  # it will be called again
        except SpecError as error:
            if error.path == "request_id":
                return  # the request has ended meanwhile
            raise
        if "stop" in asked:
            self.is_over = True
        else:
            self._scale = asked.get("scale", 1.0)

    def fail(self, what: str) -> str | None:
        """Record that a call failed; return the problem if the request is to end, else log it."""
        self.is_over = True
        problem = (
            f"controller {self.controller.name!r} of request {self._request_id!r} failed: {what}"
        )
        if self.controller.on_error == "end":
            return problem
        _LOGGER.warning("%s; its policy is %s", problem, self.controller.on_error or "keep")
        return None

    @property
    def turns_off(self) -> bool:
        return self.controller.on_error == "off"

    def _in_thread(self, observed: Observed) -> Future[Answer]:
        """Call it in a thread of its own, which may never end."""
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it

        def run() -> None:
            try:
                value = self._decide(observed)
            except BaseException as error:  # noqa: BLE001 - the thread ends with it
                future.set_exception(RuntimeError(repr(error)))
            else:
                future.set_result(value)

        threading.Thread(target=run, name="midstream controller", daemon=True).start()
        return future


def check_beside(plan: Plan | None, params: Any, controller: Controller) -> None:
    """Check that a request has scores, and edits that an asynchronous controller can change."""
    if plan is None or not plan.probes:
        raise SpecError("controller", "it reads scores: give the request `probes`")
    check_law(plan, controller)
    if plan.controller is not None:
        raise SpecError("controller", "the request has a controller in the engine core already")
    if plan.switches:
        raise SpecError("controller", "the probes of the request switch its edits (Switch) already")
    if params.n > 1:
        raise SpecError("controller", 'in mode="async" it is for one completion: use n=1')
    check_stop_strings((), controller.name, params.stop)
