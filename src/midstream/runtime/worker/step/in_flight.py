"""A step between its planning and the arrival of its results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from midstream.ops import layout
from midstream.runtime.protocol.runs import Ints
from midstream.runtime.protocol.segments import APPLIED_0, MOST_APPLIED
from midstream.runtime.worker.row_index import PendingPositions
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_plan import StepPlan
from midstream.transport.base import Copy, Shipment


@dataclass(slots=True)  # not frozen, which would take longer in each step
class PreparedStep:
    """A step whose forward pass is queued next."""

    plan: StepPlan
    first: int  # ring unit at which the plan's first record begins
    positions: Copy | None  # of each row, to the host; None if the plan has them
    batch: StepBatch


@dataclass(slots=True)  # likewise
class InFlightStep:
    """A step, numbered from 1, whose results are copied to the host."""

    number: int
    prepared: PreparedStep
    shipment: Shipment


class ExpectedCounts:
    """What the device must count in a step if all edits by id apply, and each row's state then."""

    __slots__ = ("states", "tally", "tokens")

    def __init__(self, plan: StepPlan, signature: int) -> None:
        self.tokens = plan.tokens  # those of a repeated step are the same object
        tally = np.zeros((plan.slots.size, layout.TALLY_COLUMNS), np.int32)
        tally[:, layout.SIGNATURE] = signature
        tally[:, layout.EDITS] = plan.most
        tally[:, layout.CAPTURES] = plan.captures
        self.tally = tally.tobytes()
        self.states = np.minimum(APPLIED_0 + plan.most, MOST_APPLIED).astype(np.uint16)


def positions_of(prepared: PreparedStep, chosen: Ints) -> Ints | PendingPositions:
    """Return the position of the first row of each of the chosen runs of a step, in order."""
    runs = prepared.plan.runs
    if prepared.positions is None:
        return runs.position if chosen.size == runs.position.size else runs.position[chosen]
    return PendingPositions(prepared.positions, runs.row[chosen])


def bounds(plan: StepPlan, row: int) -> str:
    """Return the number of edits that an active row must get, as text: "2", or "1 to 2"."""
    fewest, most = int(plan.fewest[row]), int(plan.most[row])
    return str(most) if fewest == most else f"{fewest} to {most}"
