"""Parser of the setting `events`: where events of guards go, besides the log.

`{"jsonl": {"path": …}, "webhook": {"url": …}, "kafka": {"servers": …, "topic": …}}`, one or more.
Secrets are never in settings, which vLLM logs: a setting has the name of an environment variable.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field, to_builtins

from midstream.errors import ConfigError, SpecError
from midstream.validation import at, hint, listed, read_mapping, read_struct, setting, show

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=86400)]

_PATH = "midstream.events"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")
_LEAST_SECRET = 16
# Options of the Kafka client that this module, or the queue before it, decides on.
_OWN_OPTIONS = ("bootstrap.servers", "acks", "enable.idempotence", "message.timeout.ms")


class EventSettings(Struct, frozen=True, kw_only=True):
    """Settings that every sink of events has.

    Attributes:
        text: whether events have the text that a guard acted on; else it is removed.
        queue_bytes: maximum bytes of events that wait. Further ones are dropped and counted.
        batch_events: maximum number of events that are sent at once.
        linger_seconds: longest time that an event waits for others of its batch.
        call_seconds: longest time of one attempt.
        retry_seconds: age of an event in seconds up to which attempts are repeated.
        close_seconds: longest time to send what waits when the server ends.
        dead_letters: file for events that were given up, a JSON object on each line; at 64 MiB it
            is rotated, and the last 100 stay. None: they are lost.
    """

    text: bool = False
    queue_bytes: Count = 16 << 20
    batch_events: Annotated[int, Meta(ge=1, le=10_000)] = 100
    linger_seconds: Seconds = 0.5
    call_seconds: Seconds = 10.0
    retry_seconds: Seconds = 300.0
    close_seconds: Seconds = 10.0
    dead_letters: str | None = None


class JsonLinesSettings(EventSettings, frozen=True, kw_only=True):
    """Settings of the sink `jsonl`.

    Attributes:
        path: the file; its folder must exist.
        rotate_bytes: size at which it becomes `path.1`, and `path.1` becomes `path.2`.
        keep: number of such older files; the oldest is removed.
        fsync: "batch": a batch counts as written when the disk has it. "never": when the system
            has it, which a crash of the machine may lose, and one of the server not.
    """

    path: str = ""
    rotate_bytes: Count = 64 << 20
    keep: Annotated[int, Meta(ge=1, le=1000)] = 5
    fsync: Literal["batch", "never"] = "never"


class WebhookSettings(EventSettings, frozen=True, kw_only=True):
    """Settings of the sink `webhook`.

    Attributes:
        url: where batches are posted; `http` to this machine only, unless `insecure`.
        url_variable: environment variable with the URL, if that is a secret; in place of `url`.
        secret_variable: environment variable with the key of the header
            `x-midstream-signature`; None: there is no such header.
        insecure: whether `http` may go to another machine.
        backoff_seconds: longest wait after the first attempt; it doubles with each further one.
        most_backoff_seconds: longest wait between two attempts.
    """

    url: str | None = None
    url_variable: str | None = None
    secret_variable: str | None = None
    insecure: bool = False
    backoff_seconds: Seconds = 0.5
    most_backoff_seconds: Seconds = 30.0


class KafkaSettings(EventSettings, frozen=True, kw_only=True):
    """Settings of the sink `kafka`.

    Attributes:
        servers: addresses of brokers, `host:port,host:port`.
        topic: name of the topic; the key of a message is the event's id.
        options: options of the client, as librdkafka names them.
        secret_variables: environment variables with values of options, by option, such as
            `{"sasl.password": "KAFKA_PASSWORD"}`.
    """

    servers: str = ""
    topic: str = ""
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    secret_variables: Mapping[str, str] = field(default_factory=dict)


KINDS: dict[str, type[EventSettings]] = {
    "jsonl": JsonLinesSettings,
    "kafka": KafkaSettings,
    "webhook": WebhookSettings,
}


@setting(_PATH)
def read_events(value: object) -> dict[str, EventSettings]:
    """Return the settings of the sinks by kind; environment variables are not read yet."""
    sinks = {}
    for name, settings in read_mapping(value, "a dict of settings by sink").items():
        kind = KINDS.get(name) if isinstance(name, str) else None
        if kind is None:
            close = hint(name, KINDS) if isinstance(name, str) else ""
            raise SpecError("", f"unknown sink {show(name)}{close}; known: {listed(KINDS)}")
        with at(name):
            sinks[name] = _read(kind, settings)
    return sinks


def plain_events(value: object) -> dict[str, dict[str, Any]]:
    """Return the setting as plain JSON values, which `read_events` reads."""
    return {name: to_builtins(settings) for name, settings in read_events(value).items()}


@setting(f"{_PATH}.webhook")
def url_of(settings: WebhookSettings) -> str:
    """Return where a webhook is; its variable is read."""
    if settings.url is not None:
        return settings.url
    assert settings.url_variable is not None
    with at("url_variable"):
        url = _variable(settings.url_variable)
        check_url(url, settings.insecure, "the URL of the variable")
    return url


@setting(f"{_PATH}.webhook")
def secret_of(settings: WebhookSettings) -> bytes | None:
    """Return the key of a webhook's signatures; None: there are none."""
    if settings.secret_variable is None:
        return None
    with at("secret_variable"):
        secret = _variable(settings.secret_variable).encode()
        if len(secret) < _LEAST_SECRET:
            raise SpecError(
                "", f"expected a key of at least {_LEAST_SECRET} bytes, got {len(secret)}"
            )
    return secret


@setting(f"{_PATH}.kafka")
def options_of(settings: KafkaSettings) -> dict[str, str | int | float | bool]:
    """Return the options of a Kafka client, with those of variables."""
    options = dict(settings.options)
    for option, variable in settings.secret_variables.items():
        with at(f"secret_variables.{option}"):
            options[option] = _variable(variable)
    return options


def _read(kind: type[EventSettings], value: object) -> EventSettings:
    settings = read_struct(kind, read_mapping(value, "a dict of settings"))
    if settings.dead_letters is not None:
        _check_path("dead_letters", settings.dead_letters)
    if isinstance(settings, JsonLinesSettings):
        _check_path("path", settings.path)
        if settings.path == settings.dead_letters:
            raise SpecError("dead_letters", "the file of the sink itself; give another")
    if isinstance(settings, WebhookSettings):
        _check_webhook(settings)
    if isinstance(settings, KafkaSettings):
        _check_kafka(settings)
    return settings


def _check_path(name: str, path: str) -> None:
    # The processes of a server may have other working directories than the shell.
    if not os.path.isabs(path) or "\0" in path:
        raise SpecError(name, f"expected an absolute path, got {show(path)}")


def _check_webhook(settings: WebhookSettings) -> None:
    if (settings.url is None) == (settings.url_variable is None):
        raise SpecError("url", "expected one of `url` and `url_variable`")
    if settings.url is not None:
        with at("url"):
            check_url(settings.url, settings.insecure, show(settings.url))
    for name in ("url_variable", "secret_variable"):
        _check_variable(name, getattr(settings, name))
    if settings.most_backoff_seconds < settings.backoff_seconds:
        raise SpecError(
            "most_backoff_seconds",
            f"expected at least backoff_seconds, {settings.backoff_seconds:g}, got "
            f"{settings.most_backoff_seconds:g}",
        )


def check_url(url: str, is_insecure: bool, shown: str) -> None:
    """Check a webhook's URL; `shown` is what a message says of it. `is_insecure`: it may be of
    another machine by http.
    """
    try:
        from urllib.parse import urlsplit  # `import midstream` has no part of the network

        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
        address = _address_of(host or "")
    except ValueError as error:
        raise SpecError("", f"{shown} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise SpecError("", f"expected a URL that starts with https:// or http://, got {shown}")
    if parts.username is not None or parts.password is not None:
        raise SpecError("", "must have no user or password; use `secret_variable`")
    if parts.fragment or re.search(r"[\x00-\x20\x7f]", url):
        raise SpecError("", f"must have no fragment, space or control character, got {shown}")
    if address is None:
        is_here = host == "localhost" or host.endswith(".localhost")
    else:
        is_here = address.is_loopback
        if address.is_link_local or address.is_multicast or address.is_unspecified:
            raise SpecError("", f"{host} is the address of no host of its own; use another")
    if parts.scheme == "http" and not is_here and not is_insecure:
        raise SpecError("", "http to another machine can be read on the way; use https")


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the address that a host is, in any form that resolvers take; None: it is a name.

    Raises:
        ValueError: it cannot be a name.
    """
    import socket  # see `check_url`

    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return ipaddress.ip_address(socket.inet_aton(host))
        except OSError:
            host.encode("idna")
            return None
    return getattr(address, "ipv4_mapped", None) or address


def _check_kafka(settings: KafkaSettings) -> None:
    if not settings.servers:
        raise SpecError("servers", "expected addresses of brokers, host:port, got none")
    if not _TOPIC.fullmatch(settings.topic) or settings.topic in (".", ".."):
        raise SpecError(
            "topic",
            f"expected 1 to 249 of the characters A-Z a-z 0-9 . _ -, got {show(settings.topic)}",
        )
    for option in (*settings.options, *settings.secret_variables):
        if option in _OWN_OPTIONS:
            raise SpecError(f"options.{option}", "midstream sets this option itself; omit it")
    for option, variable in settings.secret_variables.items():
        _check_variable(f"secret_variables.{option}", variable)


def _check_variable(name: str, variable: str | None) -> None:
    if variable is not None and not _VARIABLE.fullmatch(variable):
        raise SpecError(name, "expected the name of an environment variable; see its value there")


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    if not value:
        raise ConfigError(f"{_PATH}: the environment variable {name} is unset or empty")
    return value
