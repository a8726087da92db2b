"""Calls of `Local` functions in the forward pass, before the op at the same tap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midstream.plan import ResolvedPlan
from midstream.plan.local_functions import find_function
from midstream.results.local_info import LocalInfo
from midstream.runtime.worker.request_state import FunctionUse, RequestState
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_plan import StepPlan
from midstream.runtime.worker.tables.device_buffers import Buffers
from midstream.sites import Tap


@dataclass(slots=True)
class _Call:
    """A call in the step that is queued next."""

    request: RequestState
    use: FunctionUse
    rows: list[int]
    positions: list[int]


class LocalCalls:
    """The functions of running requests, called where the op would run; failing ends a request."""

    def __init__(self, taps: dict[Tap, int], buffers: Buffers, slots: SlotTable) -> None:
        self._addresses = {tap: buffers.table[index].data_ptr() for tap, index in taps.items()}
        self._slots = slots
        self._pending: dict[int, list[_Call]] = {}
        self._token_ids: Callable[[], Tensor] = lambda: torch.zeros(0)

    def load(self, plan: ResolvedPlan) -> list[FunctionUse]:
        """Return the functions of a plan at this rank's taps."""
        return [
            FunctionUse(index, function, find_function(function.key, function.path))
            for index, function in enumerate(plan.functions)
            if (function.site, function.layer) in self._addresses
        ]

    def prepare(self, plan: StepPlan | None, batch: StepBatch) -> None:
        """Prepare the calls of the step that is queued next, whose positions are exact."""
        self._pending.clear()
        if plan is None:
            return
        self._token_ids = batch.token_ids
        runs = plan.runs
        calls: dict[tuple[int, int], _Call] = {}
        for index in sorted(range(runs.row.size), key=lambda run: int(runs.row[run])):
            request = self._slots.by_slot(int(runs.slot[index]))
            if request is None or request.problem:
                continue
            first, start = int(runs.row[index]), int(runs.position[index])
            stop = start + int(runs.length[index])
            for use in request.functions:
                for begin, end in use.function.where.ranges:
                    low, high = max(start, begin), stop if end is None else min(stop, end)
                    if low < high:
                        key = request.serial, use.index
                        call = calls.setdefault(key, _Call(request, use, [], []))
                        call.rows += range(first + low - start, first + high - start)
                        call.positions += range(low, high)
        for call in sorted(calls.values(), key=lambda call: call.use.index):
            tap = call.use.function.site, call.use.function.layer
            self._pending.setdefault(self._addresses[tap], []).append(call)

    def __call__(self, address: int, hidden: Tensor, residual: Tensor | None) -> None:
        """Call the functions of a tap on both halves of the stream, [T, width], in place."""
        for call in self._pending.pop(address, ()):
            if not call.request.problem:
                self._run(call, hidden, residual)

    def finish(self) -> None:
        """End requests whose functions were not called, as the forward pass is queued."""
        pending, self._pending = self._pending, {}
        for call in (call for calls in pending.values() for call in calls):
            if not call.request.problem:
                self._fail(call, "was not called: its site was not reached")

    def _run(self, call: _Call, hidden: Tensor, residual: Tensor | None) -> None:
        use = call.use
        first, count = call.rows[0], len(call.rows)
        rows: Any = slice(first, first + count)
        if call.rows[-1] != first + count - 1:
            rows = torch.tensor(call.rows, device=hidden.device)
        mine = hidden[rows]
        stream = mine.clone() if residual is None else mine + residual[rows]
        info = LocalInfo(
            request_id=call.request.id,
            site=use.function.site,
            layer=use.function.layer,
            positions=torch.tensor(call.positions),
            token_ids=self._token_ids()[rows].to(torch.int64),
        )
        use.calls += 1
        use.rows += count
        try:
            made = use.call(stream.clone(), info)
        except Exception as error:  # noqa: BLE001 the caller's code may raise anything
            self._fail(call, f"raised {type(error).__name__}: {error}")
            return
        if made is None:
            return
        problem = _mismatch(made, stream)
        if problem:
            self._fail(call, problem)
        elif residual is None:
            hidden[rows] = made
        else:
            same, high = made == stream, made.to(residual.dtype)
            low = (made.float() - high.float()).to(hidden.dtype)
            residual[rows] = residual[rows].where(same, high)
            hidden[rows] = mine.where(same, low)

    def _fail(self, call: _Call, problem: str) -> None:
        function = call.use.function
        where = f"{function.site} of layer {function.layer}, position {call.positions[0]}"
        name = f"the function {function.name} of edits[{function.source}]"
        self._slots.fail(call.request, call.positions[0], f"{where}: {name} {problem}")


def _mismatch(made: object, stream: Tensor) -> str:
    """Return what is wrong with what a function returned; empty: nothing is."""
    wanted = f"expected {stream.dtype} {tuple(stream.shape)} or None"
    if not isinstance(made, Tensor):
        return f"returned a {type(made).__name__}; {wanted}"
    if made.shape != stream.shape or made.dtype != stream.dtype:
        return f"returned {made.dtype} {tuple(made.shape)}; {wanted}"
    if made.device != stream.device:
        return f"returned rows on {made.device}; expected {stream.device}"
    return ""
