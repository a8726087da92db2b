"""Requests with a plan wait for capacity within limits, and end before the engine does."""

import asyncio
import pickle
import time

import pytest

from midstream.errors import BusyError, HttpError
from midstream.runtime.frontend.request.intake import Intake

pytestmark = pytest.mark.anyio


def test_without_limits_any_number_waits():
    Intake().check(10**9)


def test_more_than_may_wait_are_rejected_with_the_setting():
    intake = Intake()
    intake.limit(2, None, None)
    intake.check(1)
    with pytest.raises(BusyError, match=r"2 requests wait .*http\.waiting_requests"):
        intake.check(2)


async def test_a_wait_that_is_too_long_is_given_up_once():
    intake, errors, seconds = Intake(), [], []
    intake.limit(None, 0.02, lambda *seen: seconds.append(seen))
    wait = intake.begin_wait("cmpl-1", errors.append)
    await asyncio.sleep(0.1)
    wait.end()
    wait.end()
    [error] = errors
    assert "http.wait_seconds" in str(error)
    assert seconds[0] == ("cmpl-1", None)
    assert len(seconds) == 2
    assert seconds[1][1] >= 0.02


async def test_a_wait_that_ends_in_time_is_not_given_up():
    intake, errors, seconds = Intake(), [], []
    intake.limit(None, 0.02, lambda *seen: seconds.append(seen))
    intake.begin_wait("cmpl-1", errors.append).end()
    await asyncio.sleep(0.05)
    assert (errors, len(seconds)) == ([], 2)


async def test_a_drain_lets_running_calls_end_and_accepts_no_new_ones():
    intake, running = Intake(), True
    drain = asyncio.create_task(asyncio.to_thread(intake.drain, 20, lambda: running))
    await asyncio.sleep(0.1)
    assert not drain.done()
    with pytest.raises(BusyError, match="shuts down"):
        intake.check(0)
    running = False
    assert 0 < await drain < 20


def test_a_drain_ends_with_its_time():
    began = time.monotonic()
    assert Intake().drain(0.1, lambda: True) == 0
    assert time.monotonic() - began < 60


def test_the_error_is_503_and_keeps_its_time_through_a_pickle():
    error = pickle.loads(pickle.dumps(BusyError("wait", retry_after=3)))
    found = HttpError.of(error)
    assert (found.status, found.headers, found.message) == (503, {"retry-after": "3"}, "wait")
