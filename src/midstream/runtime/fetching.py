"""How the results of ended requests are fetched: one exchange with the workers, for front ends that
wait for an answer and for those that are told later.

An exchange is a generator: it yields (operation, argument) and is sent the workers' answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from midstream.runtime.parts import Answers
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
    found: dict[str, Answers] = {uid: [] for uid in uids}
    mapped = [worker.place for worker in workers if worker.is_mapped]
    answers = yield "collect", [uids, mapped]
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
    for uid in large:
        found[uid] = yield from _reading(uid, found[uid])
    return found


def _reading(uid: str, entries: Answers) -> Exchange[Answers]:
    """What was too large to come with its header, in pieces."""
    pieces: list[list[bytes]] = [[data] for _, data in entries]
    longest = max(header["nbytes"] for header, _ in entries)
    held = [not data for _, data in entries]
    for offset in range(0, longest, READ_BYTES):
        answers = yield "read", [uid, offset, READ_BYTES]
        for nth, answer in enumerate(answers):
            if held[nth]:
                pieces[nth].append(answer["data"])
    yield "release", [uid]
    return [(header, b"".join(parts)) for (header, _), parts in zip(entries, pieces, strict=True)]


def carry_out(exchange: Exchange[T], call: Callable[[str, object], list[dict[str, Any]]]) -> T:
    """The result of an exchange, by a call that waits for the answers."""
    try:
        wanted = next(exchange)
        while True:
            wanted = exchange.send(call(*wanted))
    except StopIteration as end:
        result: T = end.value
        return result
