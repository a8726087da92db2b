"""Events of a process go to every sink, with the text only where it is asked for."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support.event_receiver import Receiver

from midstream.config.event_sinks import read_events
from midstream.errors import ConfigError
from midstream.sinks.events import EventLog, event_log, webhook

CHILD = """
import sys, time
from midstream.config.event_sinks import read_events
from midstream.sinks.events import EventLog
log = EventLog(read_events({"jsonl": {"path": sys.argv[1], "linger_seconds": 0.01}}))
for number in range(10**7):
    log.put({"number": number})
    if number == 2000:
        print("on its way", flush=True)
    time.sleep(0.0002)
"""


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_sink_gets_every_event_and_the_text_only_where_it_is_asked_for(tmp_path):
    path = tmp_path / "events.jsonl"
    with Receiver() as receiver:
        log = EventLog(
            read_events({
                "jsonl": {"path": str(path), "text": True},
                "webhook": {"url": receiver.url},
            })
        )  # fmt: skip
        log.put({"guard": "g", "text": "a secret", "score": float("nan")})
        log.put({"guard": "g", "time": "then"})
        log.close()
        [(_, _, body)] = receiver.posts
    first, second = lines(path)
    assert first["text"] == "a secret"
    assert first["score"] is None
    assert second["time"] == "then"
    assert b"secret" not in body
    sent = json.loads(body)["events"]
    assert [event["id"] for event in sent] == [first["id"], second["id"]]
    assert {name: counts.delivered for name, counts in log.counts.items()} == {
        "jsonl": 2, "webhook": 2,
    }  # fmt: skip


def test_without_sinks_events_are_discarded():
    log = EventLog({})
    log.put({"guard": object()})
    log.close()
    assert (log.undelivered, log.counts) == (0, {})


@pytest.mark.parametrize("event", [{"x": object()}, {"x": "\ud800"}, {"x": 2**70}])
def test_what_is_no_json_is_counted_and_raises_nothing(tmp_path, event, caplog):
    log = EventLog(read_events({"jsonl": {"path": str(tmp_path / "x")}}))
    log.put(event)
    log.put({"guard": "g"})
    log.close()
    kept = lines(tmp_path / "x")
    assert log.undelivered + len(kept) == 2
    if log.undelivered:
        assert "an event is no JSON, and lost" in caplog.text


@pytest.mark.engine  # starts processes
def test_after_a_kill_the_ids_of_the_file_have_no_gap(tmp_path):
    path = tmp_path / "events.jsonl"
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE)
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.stdout.close()
    numbers = [int(json.loads(line)["id"].split("-")[1]) for line in path.read_text().splitlines()]
    assert len(numbers) > 500
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_sink_that_cannot_be_opened_is_an_error_of_its_setting(tmp_path):
    settings = {"jsonl": {"path": str(tmp_path / "missing" / "x")}}
    with pytest.raises(ConfigError, match=r"midstream\.events\.jsonl: the file cannot be opened"):
        EventLog(read_events(settings))
    os.mkfifo(tmp_path / "pipe")
    settings = {"jsonl": {"path": str(tmp_path / "x"), "dead_letters": str(tmp_path / "pipe")}}
    with pytest.raises(ConfigError, match="not a regular file"):
        EventLog(read_events(settings))


def test_a_full_disk_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("midstream.sinks.events.base.EventSink.backoff_seconds", 0.02)
    path = tmp_path / "events.jsonl"
    log = EventLog(read_events({"jsonl": {"path": str(path)}}))
    real, failures = os.write, iter(range(2))

    def write(handle, data):
        if next(failures, None) is not None:
            raise OSError(28, "No space left on device")
        return real(handle, data)

    monkeypatch.setattr("midstream.sinks.events.json_lines.os.write", write)
    log.put({"number": 1})
    log.close()
    assert [event["number"] for event in lines(path)] == [1]
    assert log.undelivered == 0


def test_a_guards_own_webhook_gets_its_events_alone_and_one_that_is_unused_ends(monkeypatch):
    monkeypatch.setattr(event_log, "_MOST_OWN", 1)
    with Receiver() as first, Receiver() as second, Receiver() as sink:
        log = EventLog(read_events({"webhook": {"url": sink.url, "linger_seconds": 0.01}}))
        for number in range(3):
            receiver = (first, second)[number % 2]
            log.put({"guard": "g", "text": "a secret"}, ("g", receiver.url, 5.0))
        log.put({"guard": "other"})
        log.close()
        bodies = [
            [event for _, _, body in each.posts for event in json.loads(body)["events"]]
            for each in (first, second, sink)
        ]
    assert [len(each) for each in bodies] == [2, 1, 4]
    assert all(event["text"] == "a secret" for event in bodies[0] + bodies[1])
    assert not any("text" in event for event in bodies[2])
    ids = [event["id"] for event in bodies[2]]
    assert {event["id"] for event in bodies[0]} == {ids[0], ids[2]}
    assert {event["id"] for event in bodies[1]} == {ids[1]}
    assert log.counts["guards"].delivered == 3


@pytest.fixture
def fifths(monkeypatch):
    """What a receiver says when it wants the next attempt is in fifths of a second."""
    monkeypatch.setattr(webhook, "_seconds_of", lambda said: float(said or 0) / 5)


def test_closing_waits_for_a_guards_webhook_that_ends_already_and_is_tried_again(
    fifths, monkeypatch
):
    monkeypatch.setattr(event_log, "_MOST_OWN", 1)
    with Receiver([503, (503, {"retry-after": "1"}), 200]) as first, Receiver() as second:
        log = EventLog({})
        for receiver in (first, second):  # the second one ends the queue of the first
            log.put({"guard": "g"}, ("g", receiver.url, 30.0))
        log.close()
        posts = len(first.posts)
    assert posts == 3
    assert [sum(each.received.values()) for each in (first, second)] == [1, 1]
    assert log.counts["guards"].delivered == 2


def test_a_guards_event_after_the_end_is_counted_and_starts_nothing():
    log = EventLog({})
    log.close()
    log.put({"guard": "g"}, ("g", "http://127.0.0.1:9/", 1.0))
    assert (log.counts["guards"].dropped, log.undelivered) == (1, 1)
    assert not log._own


def test_events_of_more_guards_than_end_in_time_are_counted(fifths, monkeypatch):
    monkeypatch.setattr(event_log, "_MOST_OWN", 1)
    monkeypatch.setattr(event_log, "_MOST_LEFT", 1)
    with Receiver([(503, {"retry-after": "2"}), 200]) as slow, Receiver() as second:
        log = EventLog({})
        for name, receiver in (("a", slow), ("b", second), ("c", second), ("b", second)):
            log.put({"guard": name}, (name, receiver.url, 30.0))
        assert log.counts["guards"].dropped == 1  # of `c`, as the queue of `a` has not ended
        log.close()
    assert [sum(each.received.values()) for each in (slow, second)] == [1, 2]
