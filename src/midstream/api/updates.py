"""Updates of running requests, and of weights: base classes of the two engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midstream.api.arguments import EditArgument
from midstream.results.plan_update import PlanUpdate
from midstream.results.receipt import WeightVersion
from midstream.runtime.frontend.request.call_plan import CallPlan


class Updates:
    """Updates of an offline engine."""

    _front_end: Any

    @property
    def weight_version(self) -> WeightVersion:
        """The version of the model's weights by now; a receipt has those that its request ran on.

        Raises:
            BusyError: another thread uses this LLM.
        """
        version: WeightVersion = self._front_end.weight_version()
        return version

    def update(
        self, request_id: str, *, edits: EditArgument = None, scale: float | None = None
    ) -> PlanUpdate:
        """Change the edits of a running request, between two steps of the engine; see
        `AsyncLLM.update`. It is for callers that call `llm_engine.step()` themselves.

        Args:
            request_id: id of the request, as `enqueue` or `llm_engine.add_request` has it.
            edits, scale: see `AsyncLLM.update`.

        Raises:
            SpecError, BusyError: see `AsyncLLM.update`. BusyError: another thread uses the engine.
        """
        with self._front_end.use.call():
            update: PlanUpdate = self._front_end.changes.update(request_id, edits, scale)
        return update


class AsyncUpdates:
    """Updates of an asynchronous engine."""

    _front: Any

    async def weight_version(self) -> WeightVersion:
        """Return the version of the model's weights by now, of several replicas the highest.

        Raises:
            RuntimeError: before `await llm.ready()`.
        """
        version: WeightVersion = await self._front.weight_version()
        return version

    async def update(
        self,
        request_id: str | CallPlan,
        *,
        edits: EditArgument = None,
        scale: float | None = None,
    ) -> PlanUpdate:
        """Change the edits of a running request, from the first position that is not scheduled yet.

        Earlier positions keep what they had, also where they are computed again. Captures, probes
        and server-wide edits stay as they are. The receipt lists the versions of the plan and where
        each held.

        Args:
            request_id: the id that was given to `generate`, of a request with a plan, if only
                `edits=[]`; or the CallPlan in its sampling parameters.
            edits: the request's own edits from now on, in any form of `generate`; `[]`: none. Their
                positions are those of the whole request. None: those given last.
            scale: factor on the strength of the edits given last (with the request, or as `edits`
                of an update): 0 turns them off, 1 restores them. None: 1.

        Returns:
            The number of the version, and where it begins in each completion that still runs.

        Raises:
            SpecError: the request is not running, or the edits are malformed or cannot be carried
                out for it. Its plan is unchanged.
            BusyError: the request waits for capacity, or there is none for another version.
        """
        update: PlanUpdate = await self._front.changes.update_later(request_id, edits, scale)
        return update

    async def update_all(
        self,
        requests: Sequence[CallPlan],
        *,
        edits: EditArgument = None,
        scale: float | None = None,
    ) -> list[PlanUpdate | None]:
        """Change the edits of several running requests: of all, or of none if the change of one is
        refused.

        Args:
            requests: the CallPlans in their sampling parameters.
            edits, scale: see `update`.

        Returns:
            As `update` for each; None: the request has ended.

        Raises:
            SpecError, BusyError: see `update`. No plan has changed.
        """
        changes = self._front.changes
        updates: list[PlanUpdate | None] = await changes.update_all_later(requests, edits, scale)
        return updates
