"""The way to a sink: everything gets there, in order, and everybody is told what became of it."""

import asyncio
import gc
import os
import threading
import time
import weakref
from concurrent.futures import TimeoutError, wait

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.sinking import Noting, delivery

from midstream.results.receipt import CaptureResult
from midstream.sinks.queue import ByteBudget, QueueTimes, SinkQueue


async def told_soon(queue, given, size):
    return await asyncio.wrap_future(await queue.put_soon(given, size))


@pytest.fixture
def sink():
    return Noting()


@pytest.fixture
def queue(sink):
    made = SinkQueue("noting", sink, 100, QueueTimes(patience=3600))
    yield made
    sink.go.set()
    made.close()


def test_all_is_written_in_order_and_flushed_once_when_nothing_else_comes(sink, queue):
    told = [queue.put(delivery(f"r{n}"), 1) for n in range(20)]
    assert not any(one.done() for one in told)
    queue.drain()
    assert [one.result(10).paths for one in told] == [(f"r{n}",) for n in range(20)]
    assert sink.calls == [*(f"write r{n}" for n in range(20)), "flush"]
    assert sink.threads == {"midstream sink noting"}


def test_nothing_is_told_before_the_flush(sink, queue):
    told = queue.put(delivery(), 1)
    with pytest.raises(TimeoutError):
        told.result(0.1)
    assert sink.calls == ["write r"]
    queue.drain()
    assert told.result(10) == CaptureResult(paths=("r",))
    assert sink.calls == ["write r", "flush"]


def test_a_slow_sink_makes_whoever_brings_more_wait_and_loses_nothing(sink, queue):
    sink.go.clear()
    told = []
    bringer = threading.Thread(
        target=lambda: told.extend(queue.put(delivery(f"r{n}"), 30) for n in range(10))
    )
    bringer.start()
    time.sleep(0.2)
    assert len(told) < 10, "more came than there is room for"
    assert bringer.is_alive()
    sink.go.set()
    bringer.join(10)
    queue.drain()
    assert [one.result(10).paths for one in told] == [(f"r{n}",) for n in range(10)]
    assert [call for call in sink.calls if call != "flush"] == [f"write r{n}" for n in range(10)]


def test_what_is_written_is_flushed_before_it_takes_more_than_half_of_the_room(sink, queue):
    first = [queue.put(delivery(f"r{n}"), 25) for n in range(2)]
    wait(first, 10)
    assert sink.calls == ["write r0", "write r1", "flush"]


def test_nobody_is_left_without_an_answer_for_long_though_nothing_drains_the_queue(sink):
    queue = SinkQueue("noting", sink, 100, QueueTimes(patience=0.05))
    assert queue.put(delivery(), 1).result(10).status == "ok"
    queue.close()


def test_what_is_larger_than_all_the_room_comes_alone(sink, queue):
    small = queue.put(delivery("small"), 10)
    large = queue.put(delivery("large"), 1000)
    assert small.done()
    queue.drain()
    assert large.result(10).status == "ok"


def test_a_write_that_fails_or_returns_no_result_is_its_own_requests_error_alone(
    sink, queue, monkeypatch
):
    sink.fails = {"write r1"}
    told = [queue.put(delivery(f"r{n}"), 1) for n in range(3)]
    queue.drain()
    found = [one.result(10) for one in told]
    assert [one.status for one in found] == ["ok", "error", "ok"]
    assert found[1].reason == "OSError: no write r1"
    sink.fails = set()
    again = queue.put(delivery("r1"), 1)
    queue.drain()
    assert again.result(10).status == "ok"
    monkeypatch.setattr(sink, "write", lambda one: 7 if one.name == "r1" else None)
    told = [queue.put(delivery(f"r{n}"), 1) for n in range(3)]
    queue.drain()
    found = [one.result(10) for one in told]
    assert [one.status for one in found] == ["ok", "error", "ok"]
    assert found[1].reason == "write returned `int`; expected a CaptureResult or None"


def test_a_flush_that_fails_is_the_error_of_all_that_it_was_for_and_of_no_others(sink, queue):
    sink.fails = {"flush"}
    told = [queue.put(delivery(f"r{n}"), 1) for n in range(2)]
    queue.drain()
    assert {one.result(10).reason for one in told} == {"OSError: no flush"}
    sink.fails = set()
    after = queue.put(delivery(), 1)
    queue.drain()
    assert after.result(10).status == "ok"


def test_flush_may_say_what_became_of_each_write_that_did_not_fail(sink, queue):
    sink.fails = {"write r1"}
    sink.results = [CaptureResult("partial", "half"), CaptureResult(paths=("shard",))]
    told = [queue.put(delivery(f"r{n}"), 1) for n in range(3)]
    queue.drain()
    found = [one.result(10) for one in told]
    assert [one.status for one in found] == ["partial", "error", "ok"]
    assert found[2].paths == ("shard",)


def test_a_flush_may_yield_its_results_and_too_few_are_an_error_of_all(sink, queue, monkeypatch):
    sink.results = []
    told = queue.put(delivery(), 1)
    queue.drain()
    assert told.result(10).reason == "flush returned 0 results for 1 writes"
    monkeypatch.setattr(sink, "flush", lambda: (CaptureResult(paths=(one,)) for one in "x"))
    told = queue.put(delivery(), 1)
    queue.drain()
    assert told.result(10).paths == ("x",)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (3, "flush returned `int`; expected CaptureResults or None"),
        ([None], "flush returned a list with `None`; expected CaptureResults"),
    ],
)
def test_a_flush_that_returns_no_results_is_an_error_and_not_the_end(
    sink, queue, monkeypatch, returned, problem
):
    with monkeypatch.context() as patch:
        patch.setattr(sink, "flush", lambda: returned)
        told = queue.put(delivery(), 1)
        queue.drain()
        assert told.result(10).reason == f"TypeError: {problem}"
    after = queue.put(delivery(), 1)
    queue.drain()
    assert after.result(10).status == "ok"


def test_closing_writes_and_flushes_what_is_there_and_refuses_what_comes_after(sink, queue):
    told = [queue.put(delivery(f"r{n}"), 1) for n in range(3)]
    queue.close()
    assert all(one.result(0).status == "ok" for one in told)
    assert sink.calls[-2:] == ["flush", "close"]
    queue.close()
    assert sink.calls.count("close") == 1
    assert queue.put(delivery(), 1).result(0) == CaptureResult("error", "the sink is closed")


def test_in_a_forked_process_it_is_left_to_the_parent(sink, queue):
    child = os.fork()
    if child == 0:
        code = 99
        try:
            queue.close()
            code = len(sink.calls)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    queue.close()
    assert sink.calls == ["close"]


def test_rows_are_let_go_once_they_are_written(sink, queue):
    given = delivery()
    rows = weakref.ref(given.activations)
    told = queue.put(given, 1)
    del given
    deadline = time.monotonic() + 10
    while rows() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert rows() is None
    assert not told.done()


async def give_up(queue, name, size):
    task = asyncio.create_task(told_soon(queue, delivery(name), size))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_one_who_does_not_wait_for_room_any_more_takes_none(sink, queue):
    sink.go.clear()
    first = queue.put(delivery("first"), 90)
    asyncio.run(give_up(queue, "never", 90))
    sink.go.set()
    last = queue.put(delivery("last"), 90)
    queue.drain()
    assert first.result(10).status == last.result(10).status == "ok"
    assert "write never" not in sink.calls


def test_one_who_does_not_wait_for_the_result_any_more_disturbs_nobody(sink, queue):
    sink.go.clear()
    asyncio.run(give_up(queue, "left", 10))
    sink.go.set()
    last = queue.put(delivery("last"), 10)
    queue.drain()
    assert last.result(10).status == "ok"
    assert sink.calls[0] == "write left"
    assert sink.calls[1] in ("flush", "write last")


def test_many_callers_who_wait_share_a_flush(sink, queue):
    sink.group_seconds = 0.2

    async def ask():
        return await asyncio.gather(*(told_soon(queue, delivery(f"r{n}"), 1) for n in range(20)))

    found = asyncio.run(ask())
    assert [one.status for one in found] == ["ok"] * 20
    assert sink.calls.count("flush") == 1


def test_a_piece_that_others_follow_waits_for_them_and_the_last_has_all_flushed(sink, queue):
    async def bring():
        first = await queue.put_soon(delivery("first", is_last=False), 1)
        await asyncio.sleep(0.1)
        assert not first.done()
        return [first, await queue.put_soon(delivery("last"), 1)]

    assert [one.result(10).status for one in asyncio.run(bring())] == ["ok", "ok"]
    assert sink.calls == ["write first", "write last", "flush"]


def test_what_has_no_rows_needs_no_room_and_keeps_its_place(sink, queue):
    sink.go.clear()
    told = queue.put(delivery("large"), 40)
    queue.put_empty(delivery("end"))
    sink.go.set()
    queue.drain()
    assert told.result(10).status == "ok"
    assert sink.calls == ["write large", "write end", "flush"]


@given(st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=30))
def test_room_is_given_in_order_never_too_much_and_never_forgotten(asked):
    bound = ByteBudget(10)
    held = []
    waiting = []

    def check():
        while waiting and waiting[0][1].done():
            held.append(waiting.pop(0)[0])
        assert not any(room.done() for _, room in waiting), "somebody overtook"
        assert sum(held) <= 10 or len(held) == 1
        assert not waiting or sum(held) + waiting[0][0] > 10

    for size, gives in asked:
        waiting.append((size, bound.take(size)))
        check()
        if gives and held:
            bound.give(held.pop())
            check()
    while held:
        bound.give(held.pop())
        check()
    assert not waiting
    assert not bound.is_wanted


def test_one_who_left_is_passed_over_even_where_it_stands_first():
    bound = ByteBudget(10)
    bound.take(8)
    gone, next_one = bound.take(5), bound.take(2)
    assert gone.cancel()
    assert not next_one.done()
    bound.give(8)
    assert next_one.done()
    assert bound.take(8).done()
