"""What a running request has of the worker: its plan's entries in the tables, sums and states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from midstream.plan import ResolvedPlan
from midstream.runtime.worker.automaton_states import AutomatonStates
from midstream.runtime.worker.gate_states import GateStates
from midstream.runtime.worker.plan_table import PlanTable
from midstream.runtime.worker.reductions import Reductions
from midstream.runtime.worker.request_state import FunctionUse, RankPlan
from midstream.runtime.worker.tables.device_rows import DeviceRowTable

# Returns the functions of a plan at this rank's taps.
Load = Callable[[ResolvedPlan], list[FunctionUse]]


class RequestResources:
    """Gives requests what their plans need, and takes it back."""

    def __init__(
        self,
        plans: PlanTable,
        states: tuple[GateStates, AutomatonStates],
        reductions: tuple[Reductions, Sequence[int]] | None,
        load: Load | None,
        device_rows: DeviceRowTable,
    ) -> None:
        self.plans = plans
        self._device_rows = device_rows
        self._gate_states, self._automata = states
        self._reductions = reductions
        self._load = load

    def acquire(self, packed: bytes, slot: int, uid: str) -> tuple[RankPlan, list[FunctionUse]]:
        """Return a request's plan and functions; give it sums and states. Pair with `release`.
        What it leaves on the device stays until the front end frees it.
        """
        plan = self.plans.acquire(packed)
        functions: list[FunctionUse] = []
        try:
            if plan.resolved.functions:
                if self._load is None:
                    raise LookupError("this worker calls no functions")
                functions = self._load(plan.resolved)
            if plan.has_states:
                self._gate_states.acquire(slot, plan.segments, plan.resolved.probes)
            if plan.resolved.automata:
                self._automata.acquire(slot, plan.resolved.automata)
            if plan.has_sums and self._reductions is not None:
                reductions, widths = self._reductions
                reductions.acquire(slot, plan.segments, widths)
            if plan.leaves_rows:
                self._device_rows.acquire(uid, plan.resolved)
        except Exception:
            self.release(plan, slot)
            raise
        return plan, functions

    def release(self, plan: RankPlan, slot: int) -> None:
        self.plans.release(plan)
        if plan.has_sums and self._reductions is not None:
            self._reductions[0].release(slot)
        if plan.has_states:
            self._gate_states.release(slot)
        if plan.resolved.automata:
            self._automata.release(slot)
