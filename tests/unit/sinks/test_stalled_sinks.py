"""A sink that does not return: its requests fail, and closing and the process end all the same."""

import logging
import os
import subprocess
import sys
import threading
import time

import pytest
from support.sinking import Noting, delivery

from midstream.results.receipt import CaptureResult
from midstream.sinks.daemon_threads import in_threads
from midstream.sinks.queue import QueueTimes, SinkQueue

FOREVER = 30.0  # a test that takes so long has failed
SOON = QueueTimes(patience=3600, call=0.1)


class Stalling(Noting):
    """One kind of its calls waits for `returns`; its flush says what became of each write."""

    def __init__(self, stalls="write"):
        super().__init__()
        self.results = []
        self.stalls = stalls
        self.entered, self.returns = threading.Event(), threading.Event()

    def _wait(self, call):
        if call == self.stalls:
            self.entered.set()
            assert self.returns.wait(FOREVER)

    def write(self, one):
        self._wait("write")
        self.results.append(CaptureResult(paths=(f"{one.name} is stored",)))
        return super().write(one)

    def flush(self):
        self._wait("flush")
        super().flush()
        found, self.results = self.results, []
        return found

    def close(self):
        self._wait("close")
        return super().close()


def stalled(stalls, times=SOON):
    sink = Stalling(stalls)
    return sink, SinkQueue("disk", sink, 100, times)


@pytest.mark.parametrize("call", ["write", "flush"])
def test_a_call_that_does_not_return_is_the_error_of_all_that_the_sink_was_given(call, caplog):
    sink, queue = stalled(call)
    with caplog.at_level(logging.ERROR):
        told = [queue.put(delivery(f"r{n}"), 10) for n in range(3)]
        queue.drain()
        found = [one.result(FOREVER) for one in told]
        # What comes while it does not return has the same end, at once.
        found.append(queue.put(delivery("late"), 10).result(FOREVER))
    assert {one.status for one in found} == {"error"}
    assert {one.reason for one in found} == {
        f"{call} has not returned for 0.1 s (the sink's `call_seconds`)"
    }
    assert queue.unwritten == 0
    assert "the sink disk: " in caplog.text
    assert "3 deliveries of 30 bytes" in caplog.text
    sink.returns.set()
    queue.close()


def test_who_waits_for_room_in_a_stalled_sink_ends_with_its_error_too():
    sink, queue = stalled("write")
    queue.put(delivery("first"), 100)
    found = queue.put(delivery("second"), 100).result(FOREVER)
    assert found.status == "error"
    sink.returns.set()
    queue.close()


@pytest.mark.parametrize("call", ["write", "flush"])
def test_a_sink_that_returns_after_all_takes_deliveries_again_with_results_of_their_own(call):
    sink, queue = stalled(call)
    first = queue.put(delivery("first"), 10)
    queue.drain()
    assert first.result(FOREVER).status == "error"
    sink.stalls = ""
    sink.returns.set()
    # Until the call has returned, the sink takes nothing.
    for nth in range(10_000):
        told = queue.put(delivery(f"r{nth}"), 10)
        queue.drain()
        found = told.result(FOREVER)
        if found.status == "ok" or "has not returned" not in found.reason:
            break
        time.sleep(0.001)
    assert found == CaptureResult(paths=(f"r{nth} is stored",))
    assert first.result().status == "error"
    queue.close()


@pytest.mark.parametrize("call", ["write", "flush", "close"])
def test_closing_ends_though_the_sink_does_not_and_the_log_says_what_is_lost(call, caplog):
    sink, queue = stalled(call)
    told = queue.put(delivery(), 10)
    until = time.monotonic() + FOREVER
    with caplog.at_level(logging.ERROR):
        queue.close()
        # Another thread logs it, maybe after `close` has seen that the call does not return.
        while f"{call} has not returned" not in caplog.text and time.monotonic() < until:
            time.sleep(0.001)
    assert told.result(0).status == ("ok" if call == "close" else "error")
    assert f"{call} has not returned" in caplog.text
    if call != "close":
        assert "1 deliveries of 10 bytes" in caplog.text
    assert queue.put(delivery(), 10).result(FOREVER).status == "error"
    sink.returns.set()


def test_closing_ends_after_its_own_time_though_each_call_returns(caplog):
    """A sink that is slow, and whose calls do not exceed their limit."""
    sink, queue = stalled("write", QueueTimes(patience=3600, call=3600, close=0.1))
    told = [queue.put(delivery(f"r{n}"), 10) for n in range(3)]
    assert sink.entered.wait(FOREVER)
    with caplog.at_level(logging.ERROR):
        queue.close()
    assert {one.result(FOREVER).status for one in told} == {"error"}
    assert "3 deliveries of 30 bytes" in caplog.text
    assert "`close_seconds`" in told[0].result().reason
    sink.returns.set()


HANGING = """
import threading, time
from midstream.sinks import Sink
from midstream.sinks.daemon_threads import in_threads
from midstream.sinks.queue import QueueTimes, SinkQueue
from support.sinking import delivery

forever = threading.Event()

class Hanging(Sink):
    def write(self, delivery):
        forever.wait()

class InThreads(Sink):
    def write(self, delivery):
        in_threads(lambda _: forever.wait(), range(3), 2)

for sink in (Hanging(), InThreads()):
    queue = SinkQueue("disk", sink, 100, QueueTimes(call=0.1))
    print(queue.put(delivery(), 10).result(30).status, flush=True)
    queue.close()
    print("closed", flush=True)
"""


@pytest.mark.engine  # in a process of its own
def test_a_thread_that_hangs_in_a_sink_does_not_keep_the_process_from_exiting():
    done = subprocess.run(
        [sys.executable, "-c", HANGING],
        capture_output=True,
        text=True,
        timeout=2 * FOREVER,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.stdout.split() == ["error", "closed"] * 2


def test_results_of_threads_are_in_the_order_of_their_items_and_errors_are_raised():
    assert in_threads(lambda n: n * n, range(20), 3) == [n * n for n in range(20)]
    assert in_threads(lambda n: n, (), 3) == []
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda n: 1 // n, (1, 0, 2), 2)
