"""The sink of Kafka, against librdkafka's own cluster of one broker in this process."""

import json
import sys
import time

import pytest

from midstream.config.event_sinks import read_events
from midstream.errors import ConfigError, MissingExtraError
from midstream.sinks.events import EventLog

SETTINGS = {"servers": "127.0.0.1:1", "topic": "guards"}


def test_without_the_client_the_server_does_not_start_and_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r'pip install "midstream\[kafka\]"'):
        EventLog(read_events({"kafka": SETTINGS}))


@pytest.fixture
def broker():
    """The address of a broker."""
    kafka = pytest.importorskip("confluent_kafka")
    owner = kafka.Producer({"bootstrap.servers": "127.0.0.1:1", "test.mock.num.brokers": 1})
    [there] = owner.list_topics(timeout=10).brokers.values()
    yield f"{there.host}:{there.port}"
    owner.flush(1)


def consumed(broker, count):
    from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition

    # Without a group, whose members wait for one another for three seconds.
    consumer = Consumer({"bootstrap.servers": broker, "group.id": "test"})
    partitions = consumer.list_topics("guards", timeout=10).topics["guards"].partitions
    consumer.assign([TopicPartition("guards", nth, OFFSET_BEGINNING) for nth in partitions])
    messages, end = [], time.monotonic() + 60
    while len(messages) < count and time.monotonic() < end:
        message = consumer.poll(0.5)
        if message is not None and message.error() is None:
            messages.append((message.key().decode(), json.loads(message.value())))
    consumer.close()
    return messages


def test_events_are_messages_with_their_ids_as_keys(broker):
    log = EventLog(read_events({"kafka": {**SETTINGS, "servers": broker}}))
    for number in range(20):
        log.put({"number": number})
    log.close()
    assert log.counts["kafka"].delivered == 20
    messages = consumed(broker, 20)
    assert {event["number"] for _, event in messages} == set(range(20))
    assert all(key == event["id"] for key, event in messages)


def test_events_that_no_broker_takes_become_dead_letters(tmp_path):
    pytest.importorskip("confluent_kafka")
    path = tmp_path / "dead.jsonl"
    own = {"call_seconds": 0.4, "retry_seconds": 0.1, "dead_letters": str(path)}
    log = EventLog(read_events({"kafka": {**SETTINGS, **own}}))
    for number in range(3):
        log.put({"number": number})
    log.close()
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [0, 1, 2]
    assert log.undelivered == 3


def test_an_option_that_the_client_does_not_know_is_rejected(monkeypatch):
    pytest.importorskip("confluent_kafka")
    with pytest.raises(ConfigError, match=r"events\.kafka\.options: .*no\.such"):
        EventLog(read_events({"kafka": {**SETTINGS, "options": {"no.such": 1}}}))
    monkeypatch.delenv("PASSWORD", raising=False)
    secret = {**SETTINGS, "secret_variables": {"sasl.password": "PASSWORD"}}
    with pytest.raises(ConfigError, match="the environment variable PASSWORD is unset"):
        EventLog(read_events({"kafka": secret}))
