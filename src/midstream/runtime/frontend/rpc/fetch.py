"""Exchanges that fetch results: generators that yield an RPC request, and get its answers."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from midstream.errors import RankError
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.codec import decode
from midstream.runtime.protocol.results import (
    KEPT_CHECKSUMS,
    Leased,
    ResultHeader,
    StepChecksum,
    WorkerAnswer,
    WorkerAnswers,
    partial_name,
)
from midstream.runtime.protocol.rpc import (
    A,
    CollectedResults,
    CollectPartialRows,
    CollectResults,
    DiscardData,
    ReadData,
    ResultData,
    RpcRequest,
    RunningScores,
)
from midstream.runtime.protocol.scores import ScoreBlock, score_blocks
from midstream.runtime.protocol.worker_info import WorkerInfo

READ_BYTES = 64 << 20

T = TypeVar("T")
Exchange = Generator[RpcRequest[Any], list[Any], T]


class Call(Protocol):
    """Sends a request to all workers of an engine and waits for their answers."""

    def __call__(self, request: RpcRequest[A], /) -> list[A]: ...


def collect(workers: Sequence[RemoteWorker], uids: list[str]) -> Exchange[dict[str, WorkerAnswers]]:
    """Fetch all results of ended requests, by uid; the workers forget them."""
    answers = yield from _fetch(workers, CollectResults(uids, *_reader(workers)), uids)
    return answers


def collect_partial(
    workers: Sequence[RemoteWorker], stops: Mapping[str, Mapping[str, int]]
) -> Exchange[dict[str, WorkerAnswers]]:
    """Fetch rows of running requests, below positions by uid and vLLM's id, from the workers."""
    request = CollectPartialRows(
        {uid: dict(positions) for uid, positions in stops.items()}, *_reader(workers)
    )
    answers = yield from _fetch(workers, request, [partial_name(uid) for uid in stops])
    return {uid: answers[partial_name(uid)] for uid in stops}


def _reader(workers: Sequence[RemoteWorker]) -> tuple[list[Any], int]:
    """Return the workers whose arena this front end maps, and its number."""
    mapped = [worker.info.rank for worker in workers if worker.is_mapped]
    return mapped, workers[0].front_end if workers else 0


def _fetch(
    workers: Sequence[RemoteWorker], request: RpcRequest[CollectedResults], names: list[str]
) -> Exchange[dict[str, WorkerAnswers]]:
    """Fetch what the workers put into their buffers, under some names, for a request."""
    results: dict[str, WorkerAnswers] = {name: [] for name in names}
    answers: list[CollectedResults] = yield request
    large: set[str] = set()
    of_workers = [
        decode(list[ResultHeader], answer.headers, "results of a worker") for answer in answers
    ]
    # Leases that no array ends yet.
    unread = [
        {header.lease.number for header in mine if header.lease is not None} for mine in of_workers
    ]
    try:
        check_traces([worker.info for worker in workers], [answer.checksums for answer in answers])
        for worker, answer, headers, mine in zip(workers, answers, of_workers, unread, strict=True):
            worker.see(headers, answer.retired)
            leases: dict[int, Leased | None] = {}
            for header, data in zip(headers, answer.inline, strict=True):
                if data is None:
                    large.add(header.name)
                leased = None
                if header.lease is not None:
                    number = header.lease.number
                    if number not in leases:
                        mine.discard(number)
                        leases[number] = worker.leased(header.lease)
                    leased = leases[number]
                results[header.name].append(WorkerAnswer(worker.info, header, data or b"", leased))
    except BaseException:
        for worker, mine in zip(workers, unread, strict=True):
            worker.end_leases(mine)
        raise
    for name in large:
        results[name] = yield from _read(name, results[name])
    return results


def _read(name: str, answers: WorkerAnswers) -> Exchange[WorkerAnswers]:
    parts: list[list[bytes]] = [[answer.data] for answer in answers]
    longest = max(answer.header.nbytes for answer in answers)
    is_missing = [not answer.data for answer in answers]
    for offset in range(0, longest, READ_BYTES):
        results: list[ResultData] = yield ReadData(name, offset, READ_BYTES)
        for index, result in enumerate(results):
            if is_missing[index]:
                parts[index].append(result.data)
    yield DiscardData(name)
    return [
        replace(answer, data=b"".join(mine)) for answer, mine in zip(answers, parts, strict=True)
    ]


def carry_out(exchange: Exchange[T], call: Call) -> T:
    """Return the result of an exchange, by a call that waits for the answers."""
    return carry_on(exchange, call(next(exchange)), call)


def carry_on(exchange: Exchange[T], answers: list[Any], call: Call) -> T:
    """Return the result of an exchange whose first request has been answered."""
    try:
        while True:
            answers = call(exchange.send(answers))
    except StopIteration as end:
        result: T = end.value
        return result


def scores_by_uid(
    workers: Sequence[RemoteWorker], uids: Iterable[str], answers: Sequence[RunningScores]
) -> dict[str, list[ScoreBlock]]:
    blocks: dict[str, list[ScoreBlock]] = {uid: [] for uid in uids}
    for worker, answer in zip(workers, answers, strict=True):
        for uid, block in score_blocks(worker.info, answer.requests, answer.data):
            blocks[uid].append(block)
    return blocks


def check_traces(workers: Sequence[WorkerInfo], checksums: Sequence[list[StepChecksum]]) -> None:
    traces = [
        {checksum.step: checksum for checksum in worker_checksums} for worker_checksums in checksums
    ]
    if not all(traces):
        return
    last = min(max(trace) for trace in traces)
    first_of_stage: dict[int, int] = {}
    for index, (worker, trace) in enumerate(zip(workers, traces, strict=True)):
        if last not in trace:
            raise RankError(
                f"worker {worker.place} is more than {KEPT_CHECKSUMS} steps ahead of another one"
            )
        other = first_of_stage.setdefault(worker.stage, index)
        mine = trace[last]
        for what, against, is_same in (
            ("received other requests or batches", 0, mine.received == traces[0][last].received),
            ("executed other operations", other, mine.executed == traces[other][last].executed),
        ):
            if not is_same:
                raise RankError(
                    f"by step {last} worker {worker.place} {what} than worker "
                    f"{workers[against].place}"
                )
