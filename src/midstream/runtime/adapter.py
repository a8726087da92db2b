"""What a runner adapter calls. Each of vLLM's two model runners has one adapter, and nothing else
in midstream knows which runner there is.
"""

from __future__ import annotations

from typing import Any

from midstream.runtime.carried import carried
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
