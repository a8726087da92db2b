"""The queue before a sink of events: nothing waits, nothing is lost without being counted."""

import json
import threading
import time

import pytest

from midstream.config.event_sinks import EventSettings
from midstream.sinks.events.base import DELIVERED, EventSink, SendResult, SinkEvent
from midstream.sinks.events.json_lines import JsonLinesFile
from midstream.sinks.events.queue import EventQueue

FAILED = SendResult("broken", may_retry=True)
REFUSED = SendResult("malformed")


class Scripted(EventSink):
    """Ends each attempt as `outcomes` say, the last for all further ones; an exception is raised,
    an event waited for.
    """

    backoff_seconds = most_backoff_seconds = 0.01

    def __init__(self, *outcomes):
        self.outcomes = outcomes or (DELIVERED,)
        self.attempts = []  # (ids, seconds) of every attempt
        self.received = []  # ids
        self.closed = 0

    def send(self, batch, seconds):
        outcome = self.outcomes[min(len(self.attempts), len(self.outcomes) - 1)]
        self.attempts.append(([event.id for event in batch], seconds))
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(outcome, threading.Event):
            outcome.wait(60)
            outcome = DELIVERED
        if isinstance(outcome, int):  # so many of the batch
            outcome = SendResult("some", may_retry=True, left=batch[outcome:])
        left = () if not outcome.problem else batch if outcome.left is None else outcome.left
        self.received += [event.id for event in batch if event not in left]
        return outcome

    def close(self):
        self.closed += 1


def event(number, size=20):
    return SinkEvent(str(number), b"%*d" % (size, number), time.monotonic())


def queue_of(sink, dead_letters=None, **settings):
    """A queue; a test of what is sent together sets `batch_events`, and a linger without end."""
    own = {"linger_seconds": 0.01, "close_seconds": 5.0, **settings}
    return EventQueue("test", sink, EventSettings(**own), dead_letters)


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.005)


def numbers(count):
    return [str(number) for number in range(count)]


def put_all(queue, count):
    for number in range(count):
        queue.put(event(number))


def test_events_arrive_in_order_in_batches_and_the_sink_is_closed_once():
    sink = Scripted()
    queue = queue_of(sink, batch_events=10, linger_seconds=60.0)
    put_all(queue, 25)
    until(lambda: len(sink.received) == 20)  # whole batches do not linger
    queue.close()
    queue.close()
    assert sink.received == numbers(25)
    assert [len(ids) for ids, _ in sink.attempts] == [10, 10, 5]
    assert (queue.counts.delivered, queue.counts.waiting, sink.closed) == (25, 0, 1)


def test_an_event_lingers_no_longer_than_its_setting():
    sink = Scripted()
    queue = queue_of(sink, linger_seconds=0.2)
    began = time.monotonic()
    put_all(queue, 1)
    until(lambda: sink.received)
    assert time.monotonic() - began >= 0.2
    queue.close()


def test_a_batch_is_sent_again_until_it_is_received():
    sink = Scripted(FAILED, OSError(28, "No space left on device"), RuntimeError("x"), DELIVERED)
    queue = queue_of(sink, batch_events=3, linger_seconds=60.0)
    put_all(queue, 3)
    until(lambda: sink.received)
    queue.close()
    assert sink.received == numbers(3)
    assert len({tuple(ids) for ids, _ in sink.attempts}) == 1
    assert queue.counts.delivered == 3


def test_only_what_was_not_received_is_sent_again():
    sink = Scripted(2, 0, DELIVERED)
    queue = queue_of(sink, batch_events=5, linger_seconds=60.0)
    put_all(queue, 5)
    until(lambda: len(sink.received) == 5)
    queue.close()
    assert [ids for ids, _ in sink.attempts] == [numbers(5), numbers(5)[2:], numbers(5)[2:]]
    assert (queue.counts.delivered, queue.counts.undelivered) == (5, 0)


def test_a_full_queue_drops_and_counts_and_does_not_wait(caplog):
    hang = threading.Event()
    queue = queue_of(Scripted(hang), queue_bytes=100, batch_events=1)
    put_all(queue, 1000)  # while the sink hangs
    assert (queue.counts.dropped, queue.counts.waiting) == (995, 5)
    hang.set()
    until(lambda: queue.counts.delivered == 5)
    queue.put(event(0))  # there is space again
    queue.close()
    assert (queue.counts.dropped, queue.counts.delivered) == (995, 6)
    [line] = [record for record in caplog.records if "its queue is full" in record.message]
    assert "1 events are lost so far" in line.message


def test_what_a_receiver_refuses_becomes_dead_letters_and_the_next_batch_is_sent(tmp_path):
    sink = Scripted(REFUSED, DELIVERED)
    dead = JsonLinesFile(str(tmp_path / "dead.jsonl"))
    queue = queue_of(sink, dead, batch_events=2, linger_seconds=60.0)
    put_all(queue, 4)
    queue.close()
    assert sink.received == ["2", "3"]
    assert [json.loads(line) for line in (tmp_path / "dead.jsonl").open()] == [0, 1]
    assert (queue.counts.dead_letters, queue.counts.dropped, queue.counts.delivered) == (2, 0, 2)
    assert queue.counts.undelivered == 2


class Slow(Scripted):
    """Fails each attempt, which lasts a second by its own clock."""

    backoff_seconds = 0.0

    def __init__(self):
        super().__init__(FAILED)
        self.now = 5000.0

    def monotonic(self):
        return self.now

    def send(self, batch, seconds):
        self.now += 1.0
        return super().send(batch, seconds)


def test_attempts_end_at_the_age_of_the_setting_and_without_a_file_the_loss_is_told(
    caplog, monkeypatch
):
    sink = Slow()
    monkeypatch.setattr("midstream.sinks.events.queue.time", sink)
    queue = queue_of(sink, retry_seconds=3.5, batch_events=2, linger_seconds=60.0)
    for number in range(2):
        queue.put(SinkEvent(str(number), b"1", sink.now))
    until(lambda: queue.counts.dropped == 2)
    assert len(sink.attempts) == 4
    # An old event has one attempt.
    queue.put(SinkEvent("old", b"1", sink.now - 1000))
    until(lambda: queue.counts.dropped == 3)
    assert len(sink.attempts) == 5
    queue.close()
    assert "broken; 2 events are lost; the setting `dead_letters` would keep them" in caplog.text


def test_waits_grow_up_to_their_limit_and_are_spread(monkeypatch):
    asked = []

    def drawn(low, high):
        asked.append((low, high))
        return high / 100

    monkeypatch.setattr("midstream.sinks.events.queue.random.uniform", drawn)
    sink = Scripted(*[FAILED] * 6, DELIVERED)
    sink.backoff_seconds, sink.most_backoff_seconds = 0.1, 1.0
    queue = queue_of(sink)
    put_all(queue, 1)
    until(lambda: sink.received)
    queue.close()
    assert asked == [(0, pytest.approx(high)) for high in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0)]


def test_a_receiver_that_asks_for_a_pause_gets_it():
    sink = Scripted(SendResult("busy", may_retry=True, retry_after=0.2), DELIVERED)
    queue = queue_of(sink)
    began = time.monotonic()
    put_all(queue, 1)
    until(lambda: sink.received)
    assert time.monotonic() - began >= 0.2
    queue.close()


def test_closing_tries_at_once_and_not_after_the_pause():
    sink = Scripted(SendResult("busy", may_retry=True, retry_after=60.0), DELIVERED)
    queue = queue_of(sink, close_seconds=30.0)
    put_all(queue, 3)
    until(lambda: sink.attempts)
    began = time.monotonic()
    queue.close()
    assert time.monotonic() - began < 20
    assert sink.received == numbers(3)


@pytest.mark.parametrize("has_file", [True, False])
def test_closing_ends_in_time_if_the_sink_hangs_and_what_is_left_is_counted(
    tmp_path, has_file, monkeypatch
):
    monkeypatch.setattr("midstream.sinks.events.queue._SETTLE_SECONDS", 0.05)
    hang = threading.Event()
    path = tmp_path / "dead.jsonl"
    sink = Scripted(hang)
    dead = JsonLinesFile(str(path)) if has_file else None
    queue = queue_of(sink, dead, batch_events=2, close_seconds=0.1)
    put_all(queue, 5)
    until(lambda: sink.attempts)
    began = time.monotonic()
    queue.close()
    assert time.monotonic() - began < 20  # it hangs for a minute
    counts = queue.counts
    assert (counts.dead_letters, counts.dropped) == ((5, 0) if has_file else (0, 5))
    assert counts.delivered == counts.waiting == 0
    if has_file:
        assert len(path.read_text().splitlines()) == 5
    hang.set()  # what the thread does then counts no more
    until(lambda: sink.closed)
    assert queue.counts == counts
    assert sink.received == numbers(2)  # in the file too: none is lost that may be


def test_an_attempt_of_a_closing_queue_has_no_more_time_than_is_left():
    sink = Scripted(FAILED)
    queue = queue_of(sink, close_seconds=0.3)
    put_all(queue, 1)
    queue.close()
    assert sink.attempts[-1][1] <= 0.3
    assert queue.counts.dropped == 1


def test_a_closed_queue_drops_and_counts():
    queue = queue_of(Scripted())
    queue.close()
    queue.put(event(0))
    assert (queue.counts.dropped, queue.counts.delivered) == (1, 0)


def test_dead_letters_that_cannot_be_written_are_counted_as_dropped(tmp_path, caplog):
    dead = JsonLinesFile(str(tmp_path / "dead.jsonl"))
    dead._write = lambda data: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    queue = queue_of(Scripted(REFUSED), dead)
    put_all(queue, 3)
    queue.close()
    assert (queue.counts.dropped, queue.counts.dead_letters) == (3, 0)
    assert "the dead letters cannot be written: [Errno 28] No space left" in caplog.text


def test_a_file_of_dead_letters_that_hangs_is_waited_for_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("midstream.sinks.events.queue._DEAD_SECONDS", 0.2)
    dead = JsonLinesFile(str(tmp_path / "dead.jsonl"))
    hang = threading.Event()
    dead._write = lambda data: hang.wait(60)
    queue = queue_of(Scripted(REFUSED), dead, batch_events=1)
    began = time.monotonic()
    put_all(queue, 100)
    queue.close()
    assert time.monotonic() - began < 4
    assert (queue.counts.dropped, queue.counts.dead_letters) == (100, 0)
    assert "the dead letters cannot be written: TimeoutError" in caplog.text
    hang.set()


def test_threads_that_put_at_the_same_time_lose_nothing():
    sink = Scripted(*(FAILED, DELIVERED, 3) * 20, DELIVERED)
    queue = queue_of(sink, batch_events=7)
    threads = [threading.Thread(target=put_all, args=(queue, 200)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    queue.close()
    assert sorted(sink.received) == sorted(numbers(200) * 4)
    assert queue.counts.delivered == 800
