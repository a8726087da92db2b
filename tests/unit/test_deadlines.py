"""Waits that end: none loses a cancellation, a result or an error, on any Python."""

import asyncio
import logging
from contextlib import suppress

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.cancelling import bounded, every_run

from midstream.deadlines import all_of, end_tasks, within

FOREVER = 30.0  # a test that takes so long has failed


async def turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


def test_what_is_awaited_gives_its_result_or_its_error():
    async def fail():
        await turns(1)
        raise ValueError("no")

    async def main():
        assert await within(FOREVER, asyncio.sleep(0, 7)) == 7
        future = asyncio.get_running_loop().create_future()
        future.set_result(8)
        assert await within(FOREVER, future) == 8
        with pytest.raises(ValueError, match="no"):
            await within(FOREVER, fail())

    bounded(main())


def test_what_takes_longer_is_cancelled_and_has_ended_when_the_error_is_raised():
    ended = []

    async def slow():
        try:
            await asyncio.sleep(10 * FOREVER)
        finally:
            await turns(3)
            ended.append(True)

    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await within(0.01, slow())
        assert ended == [True]

    bounded(main())


def test_a_result_that_is_ready_after_all_when_it_is_cancelled_is_returned():
    async def stubborn():
        try:
            await asyncio.sleep(10 * FOREVER)
        except asyncio.CancelledError:
            return "done"

    assert bounded(within(0.01, stubborn())) == "done"


# Not shrunk: each example that fails waits for `FOREVER`.
@settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(ready=st.integers(0, 6), cancelled=st.integers(0, 6), is_first=st.booleans())
def test_a_cancellation_is_never_lost_in_whatever_turn_of_the_loop_it_comes(
    ready, cancelled, is_first
):
    """In the turn in which what is awaited is done, too: before and after it."""

    async def main():
        event, undone = asyncio.Event(), []

        async def result():
            await event.wait()
            return 5

        async def wait():
            found = await within(FOREVER, result(), undone.append)
            await asyncio.Event().wait()  # where a cancellation that is lost is missed
            return found

        task = asyncio.ensure_future(wait())
        acts = [(ready, event.set), (cancelled, task.cancel)]
        for turn in range(8):
            for when, act in acts if is_first else reversed(acts):
                if when == turn:
                    act()
            await asyncio.sleep(0)
        done, _ = await asyncio.wait((task,), timeout=FOREVER)
        assert done, "the cancellation was lost"
        assert task.cancelled()
        assert undone in ([], [5])

    bounded(main(), 2 * FOREVER)


def test_whoever_is_cancelled_at_any_await_ends_as_cancelled_and_leaves_no_lock_held():
    locks = []

    async def scenario():
        lock = asyncio.Lock()
        locks.append(lock)
        await lock.acquire()
        asyncio.get_running_loop().call_soon(lock.release)
        await within(FOREVER, lock.acquire(), lambda _: lock.release())
        lock.release()

    every = list(every_run(scenario, only_root=True))
    assert len(every) > 2
    for run in every[1:]:
        assert run.is_cancelled
        assert run.ended, run
        assert isinstance(run.outcome, asyncio.CancelledError)
        assert run.left == ()
    assert not any(lock.locked() for lock in locks)


def test_a_task_that_loses_its_first_cancellation_ends_all_the_same(monkeypatch):
    monkeypatch.setattr("midstream.deadlines._AGAIN_SECONDS", 0.01)
    losses = []

    async def deaf():
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                losses.append(1)
                if len(losses) > 2:
                    raise

    async def main():
        task = asyncio.ensure_future(deaf())
        await turns(2)
        await end_tasks((task,))
        assert task.cancelled()

    bounded(main())
    assert len(losses) == 3


def test_a_task_that_does_not_end_is_left_and_named_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr("midstream.deadlines._AGAIN_SECONDS", 0.01)
    is_over = []

    async def deaf():
        while not is_over:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def main():
        task = asyncio.create_task(deaf(), name="the deaf one")
        await turns(2)
        with caplog.at_level(logging.ERROR):
            await end_tasks((task,), seconds=0.05)
        assert not task.done()
        is_over.append(True)
        await task

    bounded(main())
    assert "the deaf one" in caplog.text


def test_the_end_of_tasks_drops_their_errors_and_waits_for_no_task_that_has_ended(caplog):
    async def fail():
        raise ValueError("no")

    async def main():
        tasks = [asyncio.ensure_future(fail()), asyncio.ensure_future(asyncio.sleep(0))]
        await turns(3)
        await end_tasks(tasks)

    bounded(main())
    assert "never retrieved" not in caplog.text


def test_when_one_fails_the_others_have_ended_before_its_error_is_raised():
    ended = []

    async def slow():
        try:
            await asyncio.Event().wait()
        finally:
            await turns(4)
            ended.append(True)

    async def fail():
        await turns(2)
        raise ValueError("no")

    async def main():
        assert await all_of(asyncio.sleep(0, nth) for nth in range(3)) == [0, 1, 2]
        with pytest.raises(ValueError, match="no"):
            await all_of((slow(), fail(), slow()))
        assert ended == [True, True]

    bounded(main())


def test_at_whatever_await_it_is_cancelled_all_end():
    running = []

    async def one():
        running.append(True)
        try:
            await turns(3)
        finally:
            running.pop()

    async def scenario():
        await all_of(one() for _ in range(3))

    for run in every_run(scenario):
        assert run.ended, run
        assert run.left == ()
        assert running == []
        if run.cancels is not None:
            assert isinstance(run.outcome, asyncio.CancelledError)
