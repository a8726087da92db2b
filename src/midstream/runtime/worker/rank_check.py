"""Whether all ranks were asked for the same: checksums that each keeps, and that the front end
holds against each other. Only with the setting `check_ranks`.

The ranks of a tensor-parallel group each make the residual stream for themselves. One that edits
otherwise than the others makes another stream, and nothing on that rank is wrong by itself.
"""

from __future__ import annotations

import json
from collections import deque
from hashlib import blake2b

from midstream.runtime.protocol.results import KEPT_CHECKSUMS, StepChecksum
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_plan import StepPlan
from midstream.runtime.worker.tables.program_table import ProgramTable

_SIZE = 16  # bytes of a checksum


class RankChecksum:
    """One rank's checksums, over all that it was told since it started."""

    def __init__(self) -> None:
        self._told = blake2b(digest_size=_SIZE)
        self._done = blake2b(digest_size=_SIZE)
        self._marks: deque[StepChecksum] = deque([self._mark(0)], maxlen=KEPT_CHECKSUMS)

    def asked(self, request_id: str, uid: str, plan: bytes, computed: int) -> None:
        """A request comes; arguments as of `Session.add`."""
        said = json.dumps([request_id, uid, len(plan), computed])
        self._told.update(said.encode() + plan)

    def step(self, view: StepBatch, plan: StepPlan | None, tables: ProgramTable) -> None:
        """A step is queued.

        Args:
            view: its batch.
            plan: what it asks of the device.
            tables: what the programs in it are.
        """
        batch = [list(view.request_ids), view.scheduled.tolist(), view.computed.tolist()]
        self._told.update(json.dumps(batch).encode())
        # Captures are left out: ranks may share them.
        runs: list[object] = []
        if plan is not None:
            planned = plan.runs
            for row, length, position, program in zip(
                planned.row.tolist(),
                planned.length.tolist(),
                planned.position.tolist(),
                planned.program.tolist(),
                strict=True,
            ):
                edits = [
                    [edit.tap, edit.digest, list(edit.ids), edit.others]
                    for edit in tables.edits_of(program)
                ]
                # A row that only one rank captures has a program on that rank alone.
                if edits:
                    runs.append([row, length, position, edits])
        self._done.update(json.dumps(runs).encode())
        self._marks.append(self._mark(self._marks[-1].step + 1))

    @property
    def marks(self) -> list[StepChecksum]:
        """The latest, in order."""
        return list(self._marks)

    def _mark(self, step: int) -> StepChecksum:
        return StepChecksum(step, self._told.hexdigest(), self._done.hexdigest())
