"""How results are fetched, at a request's end and while it runs: one exchange with the workers,
for front ends that wait for an answer and for those that are told later.

An exchange is a generator: it yields (operation, argument) and is sent the workers' answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from midstream.errors import RankError
from midstream.runtime.frontend.rpc.remote_worker import RemoteWorker
from midstream.runtime.protocol.results import WorkerAnswers, piece_of
from midstream.runtime.protocol.rpc import place_of
from midstream.runtime.worker.rank_check import _KEPT

READ_BYTES = 64 << 20

T = TypeVar("T")
Exchange = Generator[tuple[str, object], list[dict[str, Any]], T]


def collect(workers: Sequence[RemoteWorker], uids: list[str]) -> Exchange[dict[str, WorkerAnswers]]:
    """Per uid, (header, data) of each worker, in their order; the workers forget it all.

    Args:
        workers: each worker.
        uids: whose results.
    """
    found = yield from _asking(workers, "collect", uids, uids)
    return found


def collect_partial(
    workers: Sequence[RemoteWorker], stops: Mapping[str, Mapping[str, int]]
) -> Exchange[dict[str, WorkerAnswers]]:
    """As `collect`, of rows of requests that go on; the workers forget those rows.

    Args:
        workers: each worker.
        stops: per uid and vLLM's id, up to which position rows are wanted.
    """
    found = yield from _asking(workers, "hand_over", stops, [piece_of(uid) for uid in stops])
    return {uid: found[piece_of(uid)] for uid in stops}


def _asking(
    workers: Sequence[RemoteWorker], op: str, argument: object, names: list[str]
) -> Exchange[dict[str, WorkerAnswers]]:
    """What the workers put into their outboxes, under some names, for an operation."""
    found: dict[str, WorkerAnswers] = {name: [] for name in names}
    mapped = [worker.place for worker in workers if worker.is_mapped]
    answers = yield op, [argument, mapped]
    check_traces([worker.description for worker in workers], answers)
    large: set[str] = set()
    for worker, answer in zip(workers, answers, strict=True):
        headers = json.loads(answer["json"])
        worker.see(headers, answer["retired"])
        for header, data in zip(headers, answer["inline"], strict=True):
            if data is None:
                large.add(header["uid"])
            leased = worker.leased(header["lease"])
            whole = {**header, "worker": worker.description, "leased": leased}
            found[header["uid"]].append((whole, data or b""))
    for name in large:
        found[name] = yield from _reading(name, found[name])
    return found


def _reading(name: str, entries: WorkerAnswers) -> Exchange[WorkerAnswers]:
    """What was too large to come with its header, in pieces."""
    pieces: list[list[bytes]] = [[data] for _, data in entries]
    longest = max(header["nbytes"] for header, _ in entries)
    held = [not data for _, data in entries]
    for offset in range(0, longest, READ_BYTES):
        answers = yield "read", [name, offset, READ_BYTES]
        for nth, answer in enumerate(answers):
            if held[nth]:
                pieces[nth].append(answer["data"])
    yield "forget", name
    return [(header, b"".join(parts)) for (header, _), parts in zip(entries, pieces, strict=True)]


def carry_out(exchange: Exchange[T], call: Callable[[str, object], list[dict[str, Any]]]) -> T:
    """The result of an exchange, by a call that waits for the answers."""
    return carry_on(exchange, call(*next(exchange)), call)


def carry_on(
    exchange: Exchange[T],
    answers: list[dict[str, Any]],
    call: Callable[[str, object], list[dict[str, Any]]],
) -> T:
    """As `carry_out`, when the first call has been answered."""
    try:
        while True:
            answers = call(*exchange.send(answers))
    except StopIteration as end:
        result: T = end.value
        return result


def check_traces(
    workers: Sequence[Mapping[str, Any]], answers: Sequence[Mapping[str, Any]]
) -> None:
    """Holds the checksums in the workers' answers against each other, if there are any.

    Args:
        workers: each worker's description.
        answers: each worker's, in the same order; `trace` has its marks.

    Raises:
        RankError: two ranks differ.
    """
    traces = [{number: rest for number, *rest in answer.get("trace", ())} for answer in answers]
    if not all(traces):
        return
    last = min(max(trace) for trace in traces)
    first_of_stage: dict[int, int] = {}
    for nth, (worker, trace) in enumerate(zip(workers, traces, strict=True)):
        if last not in trace:
            raise RankError(
                f"worker {place_of(worker)} is more than {_KEPT} steps ahead of another one"
            )
        other = first_of_stage.setdefault(worker["stage"], nth)
        for what, which, against in (("was told", 0, 0), ("did", 1, other)):
            if trace[last][which] != traces[against][last][which]:
                raise RankError(
                    f"by step {last} worker {place_of(worker)} {what} something else than worker "
                    f"{place_of(workers[against])}"
                )
