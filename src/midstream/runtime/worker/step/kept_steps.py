"""Plans of the last steps with prompts, which steps of other requests may repeat."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from midstream.runtime.protocol.runs import Ints
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_plan import StepPlan

# Each keeps some arrays with a row for each token of its step.
MOST_KEPT = 4
# What a step consists of, besides its requests.
StepKey = tuple[int, tuple[bytes, ...]]


@dataclass(frozen=True, slots=True)
class _KeptStep:
    plan: StepPlan
    of_run: Ints  # the index of each run's request among those with a plan
    position: Ints  # of each request's first row
    stop: Ints  # position of its last row + 1
    segments: Ints  # of the requests' slots afterwards


class KeptSteps:
    """The plans of the last different steps with prompts."""

    def __init__(self, slots: SlotTable) -> None:
        self._slots = slots
        self._kept: dict[StepKey, _KeptStep] = {}

    def key_of(self, batch: StepBatch, chosen: Ints, slot: Ints) -> StepKey | None:
        """Return the key of a step; None: it cannot be repeated with other requests."""
        # Steps without prompts repeat with the same requests: see `StepPlanner`.
        if batch.unknown is not None or batch.num_tokens == len(batch.request_ids):
            return None
        plans = self._slots.plans[slot]
        if not plans.all():
            return None
        parts = chosen, plans, batch.scheduled, batch.computed[chosen]
        return batch.num_tokens, tuple([part.tobytes() for part in parts])

    def repeat(self, key: StepKey, slot: Ints) -> StepPlan | None:
        """Return the plan of a step of requests in some slots; None: no such step is kept."""
        kept_step = self._kept.get(key)
        if kept_step is None:
            return None
        self._slots.states.advance(slot, kept_step.position, kept_step.stop)
        self._slots.segments[slot] = kept_step.segments
        mine = slot[kept_step.of_run]
        return kept_step.plan.of(mine, self._slots.serials(mine))

    def keep(
        self, key: StepKey, plan: StepPlan, batch: StepBatch, chosen: Ints, slot: Ints
    ) -> None:
        """Keep the plan of a step; see `key_of`."""
        if len(self._kept) >= MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        order = np.argsort(slot)
        position = batch.computed[chosen].astype(np.int64)
        self._kept[key] = _KeptStep(
            plan,
            order[np.searchsorted(slot[order], plan.runs.slot)],
            position,
            position + batch.scheduled[chosen],
            self._slots.segments[slot],
        )
