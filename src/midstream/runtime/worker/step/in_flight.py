"""A step that is under way, as the session remembers it."""

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
    """A step whose forward is queued next.

    Attributes:
        first: the ring's first row for its records, from which the plan's count.
        positions: each row's position, on its way; None where the plan knows them.
    """

    plan: StepPlan
    first: int
    positions: Copy | None


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step whose results are on their way.

    Attributes:
        number: its own, from 1.
    """

    number: int
    armed: PreparedStep
    shipment: Shipment


def shifted(tokens: NDArray[np.int32], first: int) -> NDArray[np.int32]:
    """With records that begin at a row of the ring."""
    if not first:
        return tokens
    moved: NDArray[np.int32] = tokens.copy()
    records = moved[:, layout.RECORD]
    records[records > 0] += first
    return moved


def positions_of(
    armed: PreparedStep, mine: NDArray[np.bool_] | NDArray[np.int64]
) -> NDArray[np.int64] | PendingPositions:
    """Of the first row of some of a step's runs."""
    pieces = armed.plan.pieces
    if armed.positions is None:
        return pieces.position[mine]
    return PendingPositions(armed.positions, pieces.row[mine])


def bounds(plan: StepPlan, nth: int) -> str:
    """How many edits an active row is to get, in words."""
    fewest, most = int(plan.fewest[nth]), int(plan.most[nth])
    return str(most) if fewest == most else f"{fewest} to {most}"
