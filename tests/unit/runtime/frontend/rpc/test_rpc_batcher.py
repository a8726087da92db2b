"""The RPC batcher: one call at a time, with all that has come together."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from support.stored import unmapped

from midstream.errors import FetchError
from midstream.runtime.frontend.rpc.rpc_batcher import RpcBatcher
from midstream.runtime.protocol.results import piece_of

WORKERS = [unmapped(stage) for stage in range(2)]
DESCRIPTIONS = [worker.description for worker in WORKERS]


class Workers:
    """Two workers; the second has nothing. A call takes two turns of the loop."""

    def __init__(self):
        self.calls = []
        self.running = 0
        self.fails = set()
        self.large = b""

    async def __call__(self, op, argument):
        assert not self.running, "two calls at a time"
        self.running += 1
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.running -= 1
        self.calls.append((op, argument))
        if op in self.fails:
            raise FetchError(f"{op} failed")
        if op == "peek":
            heads = [[uid, 1, [[start, stop - start]]] for uid, (start, stop) in argument.items()]
            values = [np.arange(start, stop) for start, stop in argument.values()]
            data = np.concatenate(values).astype(np.float32).tobytes()
            return [{"json": json.dumps(heads), "data": data}, {"json": "[]", "data": b""}]
        if op in ("collect", "hand_over"):
            asked, mapped = argument
            assert mapped == []
            uids = [piece_of(uid) for uid in asked] if op == "hand_over" else asked
            head = {"requests": [], "nbytes": len(self.large), "lease": None}
            heads = json.dumps([{"uid": uid, **head} for uid in uids])
            inline = [None if self.large else b"" for _ in uids]
            one = {"json": heads, "inline": inline, "retired": []}
            return [one, {**one, "inline": [b"" for _ in uids]}]
        if op == "read":
            _, offset, count = argument
            return [{"data": self.large[offset : offset + count]}, {"data": b""}]
        return [{}, {}]


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
    assert [op for op, _ in workers.calls] == ["peek"]
    for nth, [seen] in enumerate(answers):
        assert seen.worker == DESCRIPTIONS[0]
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
        ("peek", {"a": (0, 1)}),
        ("release", ["d"]),
        ("collect", [["c"], []]),
        ("peek", {"b": (0, 1)}),
    ]


def test_rows_of_requests_that_go_on_are_asked_for_together_by_id():
    async def work(workers, batcher):
        found = await asyncio.gather(
            batcher.collect_partial("u", {"0_x": 3, "1_x": 5}),
            batcher.collect_partial("v", {"y": 7}),
        )
        return workers.calls, found

    calls, found = run(work)
    assert calls == [("hand_over", [{"u": {"0_x": 3, "1_x": 5}, "v": {"y": 7}}, []])]
    for answers in found:
        assert [header["worker"] for header, _ in answers] == DESCRIPTIONS


def test_a_failed_call_fails_those_in_it_and_nobody_else():
    async def work(workers, batcher):
        workers.fails = {"collect"}
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
    assert [header["worker"] for header, _ in again] == DESCRIPTIONS


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
    assert [data for _, data in large] == [bytes(range(45)), b""]
    assert workers.calls[-1] == ("forget", "big")


def test_who_gave_up_before_the_call_is_not_asked_for():
    async def work(workers, batcher):
        gone = asyncio.create_task(batcher.peek("gone", (0, 1)))
        stays = asyncio.create_task(batcher.peek("stays", (0, 1)))
        await asyncio.sleep(0)
        gone.cancel()
        await stays
        return workers.calls

    assert run(work) == [("peek", {"stays": (0, 1)})]


def test_closing_cancels_those_who_wait():
    async def work(workers, batcher):
        waits = asyncio.create_task(batcher.collect("a"))
        await asyncio.sleep(0)
        batcher.close()
        with pytest.raises(asyncio.CancelledError):
            await waits
        return await batcher.peek("b", (0, 1))

    assert len(run(work)) == 1
