"""Scores of a step that leave with its output, for the engine core."""

from __future__ import annotations

from midstream.runtime.protocol.step_scores import ScoresOfStep, StepScores, scores_of_runs
from midstream.runtime.worker.row_index import PendingPositions
from midstream.runtime.worker.step.in_flight import PreparedStep, positions_of
from midstream.runtime.worker.step.slot_table import SlotTable
from midstream.transport.base import Shipment


def reported_scores(
    prepared: PreparedStep, shipment: Shipment, slots: SlotTable
) -> StepScores | None:
    """Return the scores that requests of a queued step report; None: there are none."""
    if not slots.num_reporting:
        return None
    runs = prepared.plan.runs
    chosen = (runs.scored > 0) & slots.reports[runs.slot]
    if not chosen.any():
        return None
    ids = slots.ids_of(runs.slot[chosen])
    row, length = runs.row[chosen], runs.length[chosen]
    position = positions_of(prepared, chosen)

    def read() -> ScoresOfStep:
        values = shipment.scores().numpy()
        known = position.values() if isinstance(position, PendingPositions) else position
        return scores_of_runs(ids, known.tolist(), row.tolist(), length.tolist(), values)

    return StepScores(read)
