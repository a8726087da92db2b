"""Checksums of a rank's plans and steps, which the front end compares (setting `check_ranks`)."""

from __future__ import annotations

import json
from collections import deque
from hashlib import blake2b
from typing import Any

import numpy as np

from midstream.runtime.protocol.results import KEPT_CHECKSUMS, StepChecksum
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step.step_plan import StepPlan
from midstream.runtime.worker.tables.program_table import ProgramTable

_SIZE = 16  # bytes of a checksum


class RankChecksum:
    """Checksums of one rank, over all plans and steps since it started."""

    def __init__(self) -> None:
        self._received = blake2b(digest_size=_SIZE)
        self._executed = blake2b(digest_size=_SIZE)
        self._marks: deque[StepChecksum] = deque([self._mark(0)], maxlen=KEPT_CHECKSUMS)

    def add_request(self, request_id: str, uid: str, plan: bytes, computed: int) -> None:
        """Add a request; see `RequestTable.add` for the arguments."""
        request = json.dumps([request_id, uid, len(plan), computed])
        self._received.update(request.encode() + plan)

    def add_step(self, batch: StepBatch, plan: StepPlan | None, tables: ProgramTable) -> None:
        """Add a step; `plan` is None if no row has a program."""
        rows = [list(batch.request_ids), batch.scheduled.tolist(), batch.computed.tolist()]
        self._received.update(json.dumps(rows).encode())
        # What is captured is not included, as ranks may share it.
        runs: list[list[Any]] = []
        if plan is not None:
            columns = plan.runs.row, plan.runs.length, plan.runs.position, plan.runs.program
            for row, length, position, program in np.array(columns).T.tolist():
                edits = [
                    [edit.tap, edit.digest, list(edit.ids), edit.others, edit.bit]
                    for edit in tables.edits_of(program)
                ]
                runs.append([row, length, position, edits])
        runs.sort()  # each rank has its own order of encodings
        # All ranks run the same model: the all-reduces in a CUDA graph of the tapped model read the
        # memory of that graph on the other ranks.
        self._executed.update(json.dumps([plan is not None, runs]).encode())
        self._marks.append(self._mark(self._marks[-1].step + 1))

    @property
    def marks(self) -> list[StepChecksum]:
        return list(self._marks)

    def _mark(self, step: int) -> StepChecksum:
        return StepChecksum(step, self._received.hexdigest(), self._executed.hexdigest())
