"""Collection of results: rows and scores of requests, at their end or while they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from midstream.runtime.worker.request_state import RequestState
from midstream.runtime.worker.request_table import RequestTable
from midstream.runtime.worker.row_block import RowBlock
from midstream.runtime.worker.row_index import ArenaRows, ScoreRows
from midstream.runtime.worker.step_recorder import StepRecorder

Span = tuple[int, int]
Stops = Mapping[str, Mapping[str, int]]


class Collection:
    """Takes rows and scores of requests out of the indexes of a `StepRecorder`."""

    def __init__(self, requests: RequestTable, recorder: StepRecorder) -> None:
        self._requests = requests
        self._recorder = recorder

    @contextmanager
    def collect(self, uids: list[str]) -> Iterator[dict[str, list[RequestState]]]:
        """Remove all requests of some uids; yield them with rows, valid in the context."""
        wanted = set(uids)
        unsettled = [request for request in self._requests.all() if request.uid in wanted]
        self._requests.settle_requests(unsettled)
        self._requests.finish([request.id for request in unsettled])
        collected = {uid: self._requests.pop_finished(uid) for uid in uids}
        requests = [request for uid_requests in collected.values() for request in uid_requests]
        serials = [request.serial for request in requests]
        rows, scores = self._recorder.rows, self._recorder.scores
        blocks, score_rows = rows.take(serials), scores.take_scores(serials)
        for request in requests:
            # A streamed row is final, even if its position was computed again later.
            request.blocks = _since(request.streamed, blocks[request.serial])
            taken = score_rows.get(request.serial)
            request.scores = [] if taken is None else [taken]
        try:
            yield collected
        finally:
            rows.free_taken()

    @contextmanager
    def collect_partial(self, stops: Stops) -> Iterator[dict[str, list[RequestState]]]:
        """Remove rows before `stops`, where no token is a draft; yield them for the context."""
        self._requests.settle()
        rows = self._recorder.rows
        requests = [
            request for request in self._requests.of_uids(stops) if request.id in stops[request.uid]
        ]
        until = {request.serial: stops[request.uid][request.id] for request in requests}
        oldest = min((request.oldest_step for request in requests), default=rows.next_step)
        blocks, oldest = rows.take_until(until, oldest)
        collected: dict[str, list[RequestState]] = {uid: [] for uid in stops}
        nothing = np.zeros(0, np.uint16)
        for request in requests:
            new_blocks = _since(request.streamed, blocks[request.serial])
            request.oldest_step = oldest
            request.streamed = max((request.streamed, *(block.stop for block in new_blocks)))
            collected[request.uid].append(
                replace(request, blocks=new_blocks, scores=[], done=nothing, doses=[])
            )
        try:
            yield collected
        finally:
            rows.free_taken()

    def read_scores(self, spans: Mapping[str, Span]) -> dict[str, tuple[RequestState, ScoreRows]]:
        """Return scores of running requests at positions [start, stop), by uid; they stay."""
        self._requests.settle()
        requests = {request.serial: request for request in self._requests.of_uids(spans)}
        wanted = {serial: spans[request.uid] for serial, request in requests.items()}
        count = sum(request.num_scored(*wanted[serial]) for serial, request in requests.items())
        scores = self._recorder.scores.read(wanted, count)
        return {requests[serial].uid: (requests[serial], rows) for serial, rows in scores.items()}


def _since(position: int, blocks: list[RowBlock[ArenaRows]]) -> list[RowBlock[ArenaRows]]:
    """Return the rows of some blocks at `position` and later, without blocks that have none."""
    if not position:
        return blocks
    later_blocks = [block.since(position) for block in blocks]
    return [block for block in later_blocks if block.runs]
