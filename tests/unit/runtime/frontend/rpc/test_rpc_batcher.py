"""The courier: one call at a time, with all that has come together."""

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
    courier = RpcBatcher(workers, WORKERS)
    return asyncio.run(work(workers, courier))


def test_what_comes_together_goes_in_one_call():
    async def work(workers, courier):
        return workers, await asyncio.gather(
            *(courier.peek(f"u{n}", (n, n + 2)) for n in range(200))
        )

    workers, answers = run(work)
    assert [op for op, _ in workers.calls] == ["peek"]
    for nth, [seen] in enumerate(answers):
        assert seen.worker == DESCRIPTIONS[0]
        assert seen.positions.tolist() == [nth, nth + 1]
        assert seen.values.tolist() == [[nth], [nth + 1]]


def test_what_comes_during_a_call_goes_in_the_next():
    async def work(workers, courier):
        first = asyncio.create_task(courier.peek("a", (0, 1)))
        while not workers.running:
            await asyncio.sleep(0)
        rest = [courier.peek("b", (0, 1)), courier.collect("c"), courier.release("d")]
        await asyncio.gather(first, *rest)
        return workers.calls

    assert run(work) == [
        ("peek", {"a": (0, 1)}),
        ("release", ["d"]),
        ("collect", [["c"], []]),
        ("peek", {"b": (0, 1)}),
    ]


def test_rows_of_requests_that_go_on_are_asked_for_together_by_id():
    async def work(workers, courier):
        found = await asyncio.gather(
            courier.hand_over("u", {"0_x": 3, "1_x": 5}), courier.hand_over("v", {"y": 7})
        )
        return workers.calls, found

    calls, found = run(work)
    assert calls == [("hand_over", [{"u": {"0_x": 3, "1_x": 5}, "v": {"y": 7}}, []])]
    for answers in found:
        assert [header["worker"] for header, _ in answers] == DESCRIPTIONS


def test_a_failed_call_fails_those_in_it_and_nobody_else():
    async def work(workers, courier):
        workers.fails = {"collect"}
        found = await asyncio.gather(
            courier.collect("a"), courier.collect("b"), courier.peek("c", (0, 1)),
            return_exceptions=True,
        )  # fmt: skip
        workers.fails = set()
        return found, await courier.collect("a")

    (first, second, seen), again = run(work)
    assert isinstance(first, FetchError)
    assert isinstance(second, FetchError)
    assert len(seen) == 1
    assert [header["worker"] for header, _ in again] == DESCRIPTIONS


def test_scores_do_not_wait_for_large_results_to_be_read(monkeypatch):
    monkeypatch.setattr("midstream.runtime.frontend.rpc.fetch.READ_BYTES", 10)

    async def work(workers, courier):
        workers.large = bytes(range(45))
        large = asyncio.create_task(courier.collect("big"))
        while not workers.calls:
            await asyncio.sleep(0)
        await courier.peek("a", (0, 1))
        before = len(workers.calls)
        return workers, before, await large

    workers, before, large = run(work)
    assert before < len(workers.calls)
    assert [data for _, data in large] == [bytes(range(45)), b""]
    assert workers.calls[-1] == ("forget", "big")


def test_who_gave_up_before_the_call_is_not_asked_for():
    async def work(workers, courier):
        gone = asyncio.create_task(courier.peek("gone", (0, 1)))
        stays = asyncio.create_task(courier.peek("stays", (0, 1)))
        await asyncio.sleep(0)
        gone.cancel()
        await stays
        return workers.calls

    assert run(work) == [("peek", {"stays": (0, 1)})]


def test_closing_cancels_those_who_wait():
    async def work(workers, courier):
        waits = asyncio.create_task(courier.collect("a"))
        await asyncio.sleep(0)
        courier.close()
        with pytest.raises(asyncio.CancelledError):
            await waits
        return await courier.peek("b", (0, 1))

    assert len(run(work)) == 1
