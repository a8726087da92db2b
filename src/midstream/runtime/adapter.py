"""What a runner adapter calls. Each of vLLM's two model runners has one adapter, and nothing else
in midstream knows which runner there is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from midstream.config import KEY
from midstream.errors import SpecError
from midstream.runtime.session import Session
from midstream.runtime.stepview import StepView


class Hooks:
    """The three moments of a step."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def on_schedule(self, scheduler_output: Any) -> None:
        """The scheduler's decision for a step: requests that ended, requests that begin."""
        for request_id in scheduler_output.finished_req_ids:
            self._session.finish(request_id)
        for new in scheduler_output.scheduled_new_reqs:
            asked = carried(new.sampling_params)
            if asked is not None:
                self._session.add(new.req_id, asked.uid, asked.plan)

    def before_forward(self, view: StepView) -> None:
        """The batch is laid out; its forward is queued next."""
        self._session.before_forward(view)

    def after_forward(self) -> None:
        """The forward is queued."""
        self._session.after_forward()


class Carried(NamedTuple):
    """What a request carries from the front door to the workers.

    Attributes:
        uid: names the request for midstream, whatever ids vLLM makes of it.
        plan: `ResolvedPlan.to_bytes()`.
    """

    uid: str
    plan: bytes

    def pack(self) -> list[object]:
        """Plain values that msgpack carries unchanged."""
        return [self.uid, self.plan]


def carried(sampling_params: Any) -> Carried | None:
    """What the front door put into a request's `extra_args`; None when it asks for nothing.

    Raises:
        SpecError: it did not come through the front door.
    """
    extra_args = getattr(sampling_params, "extra_args", None)
    value = extra_args.get(KEY) if extra_args else None
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and len(value) == 2:
        uid, plan = value
        if isinstance(uid, str) and isinstance(plan, (bytes, bytearray, memoryview)):
            return Carried(uid, bytes(plan))
    raise SpecError(
        f"extra_args[{KEY!r}]",
        "reached a worker without having been checked: the front end that took the request in "
        "does not have midstream loaded",
    )
