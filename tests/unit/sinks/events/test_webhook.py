"""Webhooks on loopback: what is retried, what is not, and that no event is lost."""

import hashlib
import hmac
import json
import socket
import threading
import time

import httpx
import pytest
from support.event_receiver import HANG, RESET, Receiver

from midstream.config.event_sinks import EventSettings, WebhookSettings, read_events
from midstream.errors import ConfigError
from midstream.sinks.events import EventLog, webhook
from midstream.sinks.events.base import SinkEvent
from midstream.sinks.events.webhook import WebhookSink, result_of, signature

SECRET = "0123456789abcdef-key"


def log_of(url, **settings):
    own = {
        "backoff_seconds": 0.01, "most_backoff_seconds": 0.1, "linger_seconds": 0.02,
        **settings,
    }  # fmt: skip
    return EventLog(read_events({"webhook": {"url": url, **own}}))


def put_all(log, count):
    for number in range(count):
        log.put({"guard": "g", "number": number})


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.005)


def dead(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_batch_is_one_post_of_json_whose_events_have_consecutive_ids():
    with Receiver() as receiver:
        log = log_of(receiver.url, linger_seconds=60.0)
        put_all(log, 3)
        log.close()
        [(_, headers, body)] = receiver.posts
    events = json.loads(body)["events"]
    assert [event["number"] for event in events] == [0, 1, 2]
    runs, numbers = zip(*(event["id"].split("-") for event in events), strict=True)
    assert len(set(runs)) == 1
    assert numbers == ("1", "2", "3")
    assert headers["content-type"] == "application/json"
    assert headers["x-midstream-signature"] is None


@pytest.mark.parametrize("failure", [500, 503, 429, 408, RESET, HANG])
def test_what_may_pass_is_tried_again_with_the_same_body_and_key(failure):
    limit = {"call_seconds": 0.3} if failure == HANG else {}
    with Receiver([failure, failure, 200]) as receiver:
        log = log_of(receiver.url, batch_events=3, linger_seconds=60.0, **limit)
        put_all(log, 3)
        until(lambda: len(receiver.received) == 3)
        log.close()
        bodies = {body for _, _, body in receiver.posts}
        keys = {headers["idempotency-key"] for _, headers, _ in receiver.posts}
    assert len(receiver.posts) == 3
    assert len(bodies) == len(keys) == 1
    assert set(receiver.received.values()) == {1}
    assert log.undelivered == 0


@pytest.mark.parametrize("status", [400, 401, 404, 413, 422, 301, 307])
def test_what_will_not_pass_is_not_tried_again_and_becomes_dead_letters(tmp_path, status, caplog):
    elsewhere = {"location": "http://127.0.0.1:1/other"}
    with Receiver([(status, elsewhere), 200]) as receiver:
        path = tmp_path / "dead.jsonl"
        log = log_of(receiver.url, batch_events=2, linger_seconds=5.0, dead_letters=str(path))
        put_all(log, 4)
        log.close()
    assert len(receiver.posts) == 2
    assert [event["number"] for event in dead(path)] == [0, 1]
    assert set(receiver.received) == {f"{log._run}-3", f"{log._run}-4"}
    assert log.counts["webhook"].dead_letters == log.undelivered == 2
    assert f"the answer was {status}; 2 events are dead letters" in caplog.text
    assert "/events" not in caplog.text


def test_a_receiver_that_says_when_gets_no_attempt_before(monkeypatch):
    monkeypatch.setattr(webhook, "_seconds_of", lambda said: 0.3 * float(said or 0))
    with Receiver([(429, {"retry-after": "1"}), 200]) as receiver:
        log = log_of(receiver.url)
        put_all(log, 1)
        until(lambda: receiver.received)
        log.close()
        (first, *_), (second, *_) = receiver.posts
    assert second - first >= 0.285  # its attempts are 0.1 s apart at most


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("7", 7, 7), ("Sun, 06 Nov 1994 08:49:37 GMT", 0, 0), ("soon", 0, 0), ("-3", 0, 0),
     ("Fri, 31 Dec 2199 23:59:59 GMT", 1e9, 1e10), ("²", 0, 0)],
)  # fmt: skip
def test_a_pause_is_a_number_or_a_date(header, low, high):
    outcome = result_of(503, {"retry-after": header})
    assert low <= outcome.retry_after <= high


def test_a_receiver_that_dies_and_is_started_again_gets_every_event_at_least_once():
    first = Receiver()
    log = log_of(first.url, batch_events=5, retry_seconds=60.0, call_seconds=0.3)
    sender = threading.Thread(target=lambda: [(put_all(log, 1), time.sleep(0.002))
                                              for _ in range(200)])  # fmt: skip
    sender.start()
    until(lambda: len(first.received) >= 20)
    port = first.port
    first.close()  # with batches on their way
    time.sleep(0.1)
    with Receiver([RESET, 500, HANG, 200], port=port) as second:
        sender.join(30)
        until(lambda: len(first.received | second.received) == 200)
        log.close()
        received = first.received | second.received
    assert sorted(int(name.split("-")[1]) for name in received) == list(range(1, 201))
    assert log.undelivered == 0


def test_nothing_listens_for_longer_than_events_are_kept_and_all_are_dead_letters(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        path = tmp_path / "dead.jsonl"
        log = log_of(url, retry_seconds=0.2, dead_letters=str(path))
        put_all(log, 3)
        until(lambda: log.counts["webhook"].dead_letters == 3)
        log.close()
    assert [event["number"] for event in dead(path)] == [0, 1, 2]


def test_an_answer_that_drips_ends_with_the_time_of_the_attempt():
    over = threading.Event()

    def drip(listening):
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 ")
            while not over.wait(0.05):
                try:
                    connection.sendall(b"2")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=drip, args=(listening,))
        thread.start()
        sink = WebhookSink(WebhookSettings(url=f"http://127.0.0.1:{listening.getsockname()[1]}/"))
        began = time.monotonic()
        outcome = sink.send([SinkEvent("a", b"{}", began)], 0.4)
        assert 0.4 <= time.monotonic() - began < 20
        over.set()
        thread.join(10)
        sink.close()
    assert outcome.may_retry
    assert outcome.problem == "no answer within 0.4 s"


def test_closing_ends_in_time_while_the_receiver_hangs_and_nothing_is_lost(tmp_path):
    path = tmp_path / "dead.jsonl"
    with Receiver([HANG]) as receiver:
        log = log_of(
            receiver.url, batch_events=2, call_seconds=60.0, close_seconds=0.3,
            dead_letters=str(path),
        )  # fmt: skip
        put_all(log, 5)
        until(lambda: receiver.posts)
        began = time.monotonic()
        log.close()
        assert time.monotonic() - began < 20
    assert sorted(event["number"] for event in dead(path)) == [0, 1, 2, 3, 4]


def test_a_signature_is_of_the_time_and_the_body(monkeypatch):
    monkeypatch.setenv("HOOK_KEY", SECRET)
    with Receiver() as receiver:
        log = log_of(receiver.url, secret_variable="HOOK_KEY")
        put_all(log, 2)
        log.close()
        [(_, headers, body)] = receiver.posts
    seconds, digest = (part.split("=")[1] for part in headers["x-midstream-signature"].split(","))
    assert abs(int(seconds) - time.time()) < 60
    wanted = hmac.new(SECRET.encode(), f"{seconds}.".encode() + body, hashlib.sha256).hexdigest()
    assert digest == wanted
    assert signature(SECRET.encode(), int(seconds), body + b" ").endswith(digest) is False


def test_neither_a_proxy_nor_a_password_of_the_environment_is_used(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with Receiver() as receiver:
        log = log_of(receiver.url)
        put_all(log, 1)
        log.close()
        [(_, headers, _)] = receiver.posts
    assert headers["authorization"] is None


def test_a_failed_connection_says_nothing_of_the_url():
    sink = WebhookSink(WebhookSettings(url="http://127.0.0.1:1/token"))
    outcome = sink.send([], 5.0)
    sink.close()
    assert outcome.problem == f"the connection failed: {httpx.ConnectError.__name__}"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "the environment variable HOOK is unset or empty"),
        ({"HOOK": "short"}, "expected a key of at least 16 bytes, got 5"),
    ],
)
def test_a_key_that_is_missing_or_short_is_rejected_as_the_server_starts(
    monkeypatch, variables, message
):
    monkeypatch.delenv("HOOK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        log_of("http://127.0.0.1:1/", secret_variable="HOOK")


def test_a_url_may_be_in_a_variable_and_is_checked_there_without_being_shown(monkeypatch):
    settings = {"webhook": {"url_variable": "HOOK_URL"}}
    with Receiver() as receiver:
        monkeypatch.setenv("HOOK_URL", receiver.url)
        log = EventLog(read_events(settings))
        put_all(log, 1)
        log.close()
        assert len(receiver.received) == 1
    monkeypatch.setenv("HOOK_URL", "ftp://host/token")
    with pytest.raises(ConfigError, match="starts with https:// or http://") as caught:
        EventLog(read_events(settings))
    assert "token" not in str(caught.value)


def test_the_defaults_are_those_of_the_settings():
    settings = read_events({"webhook": {"url": "https://hooks.example/x"}})["webhook"]
    assert settings == WebhookSettings(url="https://hooks.example/x")
    assert settings.queue_bytes == EventSettings().queue_bytes
