"""A step between its planning and the arrival of its results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midstream.ops import layout
from midstream.runtime.worker.row_index import PendingPositions
from midstream.runtime.worker.step.step_plan import StepPlan
from midstream.transport.base import Copy, Shipment


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose forward pass is queued next.

    Attributes:
        plan: the step's plan.
        first: ring row that the plan's records are relative to.
        positions: copy of each row's position to the host; None if the plan has the positions.
    """

    plan: StepPlan
    first: int
    positions: Copy | None


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step whose results are copied to the host.

    Attributes:
        number: number of the step, from 1.
        prepared: the step as it was queued.
        shipment: its results.
    """

    number: int
    prepared: PreparedStep
    shipment: Shipment


def shifted(tokens: NDArray[np.int32], first: int) -> NDArray[np.int32]:
    """Return `tokens` with records relative to ring row 0, for a step that begins at `first`."""
    if not first:
        return tokens
    moved: NDArray[np.int32] = tokens.copy()
    records = moved[:, layout.RECORD]
    records[records > 0] += first
    return moved


def positions_of(
    prepared: PreparedStep, chosen: NDArray[np.bool_] | NDArray[np.int64]
) -> NDArray[np.int64] | PendingPositions:
    """Return the position of the first row of each of the chosen runs of a step."""
    runs = prepared.plan.runs
    if prepared.positions is None:
        return runs.position[chosen]
    return PendingPositions(prepared.positions, runs.row[chosen])


def bounds(plan: StepPlan, nth: int) -> str:
    """Return the number of edits that an active row must get, as text: "2", or "1 to 2"."""
    fewest, most = int(plan.fewest[nth]), int(plan.most[nth])
    return str(most) if fewest == most else f"{fewest} to {most}"
