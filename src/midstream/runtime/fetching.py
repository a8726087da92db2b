"""How results are fetched, at a request's end and while it runs: one exchange with the workers,
for front ends that wait for an answer and for those that are told later.

An exchange is a generator: it yields (operation, argument) and is sent the workers' answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from midstream.runtime.parts import Answers
from midstream.runtime.results import piece_of
from midstream.runtime.traced import check_traces
from midstream.runtime.workers import Worker

READ_BYTES = 64 << 20

T = TypeVar("T")
Exchange = Generator[tuple[str, object], list[dict[str, Any]], T]


def collecting(workers: Sequence[Worker], uids: list[str]) -> Exchange[dict[str, Answers]]:
    """Per uid, (header, data) of each worker, in their order; the workers forget it all.

    Args:
        workers: each worker.
        uids: whose results.
    """
    found = yield from _asking(workers, "collect", uids, uids)
    return found


def handing_over(
    workers: Sequence[Worker], stops: Mapping[str, Mapping[str, int]]
) -> Exchange[dict[str, Answers]]:
    """As `collecting`, of rows of requests that go on; the workers forget those rows.

    Args:
        workers: each worker.
        stops: per uid and vLLM's id, up to which position rows are wanted.
    """
    found = yield from _asking(workers, "hand_over", stops, [piece_of(uid) for uid in stops])
    return {uid: found[piece_of(uid)] for uid in stops}


def _asking(
    workers: Sequence[Worker], op: str, argument: object, names: list[str]
) -> Exchange[dict[str, Answers]]:
    """What the workers put into their outboxes, under some names, for an operation."""
    found: dict[str, Answers] = {name: [] for name in names}
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


def _reading(name: str, entries: Answers) -> Exchange[Answers]:
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
