"""The RPC batcher: one call at a time, with all that has come together."""

import asyncio

import numpy as np
import pytest
from support.stored import unmapped

from midstream.errors import BusyError, FetchError
from midstream.runtime.frontend.rpc.rpc_batcher import RpcBatcher
from midstream.runtime.protocol.codec import encode
from midstream.runtime.protocol.results import ResultHeader, partial_name
from midstream.runtime.protocol.rpc import (
    Acknowledged,
    CollectedResults,
    CollectPartialRows,
    CollectResults,
    DiscardData,
    ReadData,
    ReadScores,
    ReleaseRequests,
    ResultData,
    RunningScores,
)
from midstream.runtime.protocol.scores import RequestScores

WORKERS = [unmapped(stage) for stage in range(2)]
INFOS = [worker.info for worker in WORKERS]


class Workers:
    """Two workers; the second has nothing. A call takes two turns of the loop."""

    def __init__(self):
        self.calls = []
        self.running = 0
        self.fails = set()
        self.large = b""

    async def __call__(self, request):
        assert not self.running, "two calls at a time"
        self.running += 1
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        self.calls.append(request)
        if type(request) in self.fails:
            raise FetchError(f"{request} failed")
        match request:
            case ReadScores(spans):
                found = [RequestScores(uid, 1, [(a, b - a)]) for uid, (a, b) in spans.items()]
                values = [np.arange(start, stop) for start, stop in spans.values()]
                data = np.concatenate(values).astype(np.float32).tobytes()
                return [RunningScores(found, data), RunningScores([], b"")]
            case CollectResults(uids, []):
                return self._results(uids)
            case CollectPartialRows(stops, []):
                return self._results([partial_name(uid) for uid in stops])
            case ReadData(_, offset, size):
                return [ResultData(self.large[offset : offset + size]), ResultData(b"")]
        return [Acknowledged(), Acknowledged()]

    def _results(self, names):
        headers = [ResultHeader(name, [], len(self.large), None) for name in names]
        inline = [None if self.large else b"" for _ in names]
        nothing = [b"" for _ in names]
        return [CollectedResults(encode(headers), each, [], []) for each in (inline, nothing)]


def run(work):
    workers = Workers()
    batcher = RpcBatcher(workers, WORKERS)
    return asyncio.run(work(workers, batcher))


def test_what_comes_together_goes_in_one_call():
    async def work(workers, batcher):
        return workers, await asyncio.gather(
            *(batcher.peek(f"u{n}", (n, n + 2)) for n in range(200))
        )

    workers, answers = run(work)
    assert [type(call) for call in workers.calls] == [ReadScores]
    for nth, [seen] in enumerate(answers):
        assert seen.worker == INFOS[0]
        assert seen.positions.tolist() == [nth, nth + 1]
        assert seen.values.tolist() == [[nth], [nth + 1]]


def test_what_comes_during_a_call_goes_in_the_next():
    async def work(workers, batcher):
        first = asyncio.create_task(batcher.peek("a", (0, 1)))
        while not workers.running:
            await asyncio.sleep(0)
        rest = [batcher.peek("b", (0, 1)), batcher.collect("c"), batcher.release("d")]
        await asyncio.gather(first, *rest)
        return workers.calls

    assert run(work) == [
        ReadScores({"a": (0, 1)}),
        ReleaseRequests(["d"]),
        CollectResults(["c"], []),
        ReadScores({"b": (0, 1)}),
    ]


def test_rows_of_requests_that_go_on_are_asked_for_together_by_id():
    async def work(workers, batcher):
        found = await asyncio.gather(
            batcher.collect_partial("u", {"0_x": 3, "1_x": 5}),
            batcher.collect_partial("v", {"y": 7}),
        )
        return workers.calls, found

    calls, found = run(work)
    assert calls == [CollectPartialRows({"u": {"0_x": 3, "1_x": 5}, "v": {"y": 7}}, [])]
    for answers in found:
        assert [answer.worker for answer in answers] == INFOS


def test_a_failed_call_fails_those_in_it_and_nobody_else():
    async def work(workers, batcher):
        workers.fails = {CollectResults}
        found = await asyncio.gather(
            batcher.collect("a"), batcher.collect("b"), batcher.peek("c", (0, 1)),
            return_exceptions=True,
        )  # fmt: skip
        workers.fails = set()
        return found, await batcher.collect("a")

    (first, second, seen), again = run(work)
    assert isinstance(first, FetchError)
    assert isinstance(second, FetchError)
    assert len(seen) == 1
    assert [answer.worker for answer in again] == INFOS


def test_scores_do_not_wait_for_large_results_to_be_read(monkeypatch):
    monkeypatch.setattr("midstream.runtime.frontend.rpc.fetch.READ_BYTES", 10)

    async def work(workers, batcher):
        workers.large = bytes(range(45))
        large = asyncio.create_task(batcher.collect("big"))
        while not workers.calls:
            await asyncio.sleep(0)
        await batcher.peek("a", (0, 1))
        before = len(workers.calls)
        return workers, before, await large

    workers, before, large = run(work)
    assert before < len(workers.calls)
    assert [answer.data for answer in large] == [bytes(range(45)), b""]
    assert workers.calls[-1] == DiscardData("big")


def test_who_gave_up_before_the_call_is_not_asked_for():
    async def work(workers, batcher):
        gone = asyncio.create_task(batcher.peek("gone", (0, 1)))
        stays = asyncio.create_task(batcher.peek("stays", (0, 1)))
        await asyncio.sleep(0)
        gone.cancel()
        await stays
        return workers.calls

    assert run(work) == [ReadScores({"stays": (0, 1)})]


def test_closing_ends_those_who_wait_with_an_error():
    async def work(workers, batcher):
        waits = asyncio.create_task(batcher.collect("a"))
        await asyncio.sleep(0)
        batcher.close()
        with pytest.raises(BusyError, match="shut down"):
            await waits
        return await batcher.peek("b", (0, 1))

    assert len(run(work)) == 1
