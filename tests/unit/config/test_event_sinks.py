"""The setting `events`."""

import pytest

from midstream.config.event_sinks import (
    JsonLinesSettings,
    KafkaSettings,
    options_of,
    plain_events,
    read_events,
)
from midstream.errors import ConfigError


def test_the_plain_form_is_read_again_as_it_was():
    value = {
        "jsonl": {"path": "/srv/events.jsonl", "fsync": "batch", "text": True},
        "webhook": {"url": "https://hooks.example/x", "secret_variable": "KEY"},
        "kafka": {"servers": "a:1,b:2", "topic": "guards", "options": {"linger.ms": 5}},
    }
    plain = plain_events(value)
    assert plain_events(plain) == plain
    assert read_events(plain) == read_events(value)
    assert read_events(value)["jsonl"] == JsonLinesSettings(
        path="/srv/events.jsonl", fsync="batch", text=True
    )


def test_secrets_are_read_of_the_environment_alone(monkeypatch):
    monkeypatch.setenv("PASSWORD", "hunter2")
    settings = KafkaSettings(
        servers="a:1", topic="t", options={"linger.ms": 5},
        secret_variables={"sasl.password": "PASSWORD"},
    )  # fmt: skip
    assert options_of(settings) == {"linger.ms": 5, "sasl.password": "hunter2"}
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (["jsonl"], r"midstream\.events: expected a dict"),
        ({"json": {}}, r"events: unknown sink 'json' \(did you mean `jsonl`\?\); known: `jsonl`"),
        ({"jsonl": {}}, r"events\.jsonl\.path: expected an absolute path, got ''"),
        ({"jsonl": {"path": "events"}}, r"jsonl\.path: expected an absolute path, got 'events'"),
        ({"jsonl": {"path": "/a", "dead_letters": "b"}}, r"dead_letters: expected an absolute"),
        ({"jsonl": {"path": "/a", "dead_letters": "/a"}}, r"dead_letters: the file of the sink"),
        ({"jsonl": {"path": "/a", "fsync": "often"}}, r"jsonl\.fsync: expected"),
        ({"jsonl": {"path": "/a", "size": 1}}, r"jsonl: unknown field 'size'"),
        ({"jsonl": {"path": "/a", "queue_bytes": 0}}, r"jsonl\.queue_bytes: expected"),
        ({"jsonl": {"path": "/a", "retry_seconds": 0}}, r"jsonl\.retry_seconds: expected"),
        ({"webhook": {}}, r"webhook\.url: expected one of `url` and `url_variable`"),
        ({"webhook": {"url": "https://a", "url_variable": "A"}}, r"expected one of `url` and"),
        ({"webhook": {"url": "a.example/x"}}, r"webhook\.url: expected a URL that starts with"),
        ({"webhook": {"url": "file:///etc/passwd"}}, r"url: expected a URL that starts with"),
        ({"webhook": {"url": "http://a.example/"}}, r"url: http to another machine can be read"),
        ({"webhook": {"url": "http://10.0.0.1/"}}, r"url: http to another machine can be read"),
        ({"webhook": {"url": "https://me:pw@a.example/"}}, r"url: must have no user or password"),
        ({"webhook": {"url": "https://a.example/#x"}}, r"url: must have no fragment"),
        ({"webhook": {"url": "https://a.example/\r\nx"}}, r"url: must have no fragment"),
        ({"webhook": {"url": "https://a.example:port/"}}, r"url: .* is no URL"),
        ({"webhook": {"url": "http://169.254.169.254/"}}, r"is the address of no host of its own"),
        ({"webhook": {"url": "https://2852039166/"}}, r"is the address of no host of its own"),
        ({"webhook": {"url": "https://0xa9fea9fe/"}}, r"is the address of no host of its own"),
        ({"webhook": {"url": "https://[::ffff:a9fe:a9fe]/"}}, r"the address of no host of its own"),
        ({"webhook": {"url": "https://a..b/"}}, r"is no URL: .*label empty"),
        ({"webhook": {"url": "https://[ff02::1]/"}}, r"is the address of no host of its own"),
        ({"webhook": {"url": "https://0.0.0.0/"}}, r"is the address of no host of its own"),
        ({"webhook": {"url": "https://a", "secret_variable": "a b"}}, r"secret_variable: expected"),
        (
            {"webhook": {"url": "https://a", "backoff_seconds": 60}},
            r"most_backoff_seconds: expected at least backoff_seconds, 60, got 30",
        ),
        ({"kafka": {"topic": "t"}}, r"kafka\.servers: expected addresses of brokers"),
        ({"kafka": {"servers": "a:1", "topic": "a b"}}, r"kafka\.topic: expected 1 to 249"),
        (
            {"kafka": {"servers": "a:1", "topic": "t", "options": {"acks": 1}}},
            r"kafka\.options\.acks: midstream sets this option itself",
        ),
        (
            {"kafka": {"servers": "a:1", "topic": "t", "secret_variables": {"x": "a-b"}}},
            r"secret_variables\.x: expected the name of an environment variable",
        ),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_rejected_by_its_path(value, message):
    with pytest.raises(ConfigError, match=message):
        read_events(value)


@pytest.mark.parametrize("url", [
    "http://127.0.0.1:9/x", "http://localhost/x", "http://[::1]:9/", "https://hooks.example/x?a=b",
    "https://10.0.0.1/",
])  # fmt: skip
def test_this_machine_and_https_are_allowed(url):
    assert read_events({"webhook": {"url": url}})["webhook"].url == url


def test_http_to_another_machine_is_asked_for():
    value = {"webhook": {"url": "http://collector.internal/x", "insecure": True}}
    assert read_events(value)["webhook"].insecure
