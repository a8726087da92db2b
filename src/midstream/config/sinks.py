"""Parser of the setting `sinks`, which configures an engine's sinks.

- `{"store": {"root": "acts"}, "log": {}}`: settings by sink name;
- `"filesystem:root=/srv/acts"` or a list of such strings, for a command line;
- `{"mine": "package.module:Class"}` or `{"mine": {"class": "package.module:Class", …}}` for a sink
  class by its path, and `{"mine": MySink(…)}` or `{"mine": {"instance": MySink(…), …}}` for a sink
  of the caller's process;
- besides the sink's own settings, `capture`, a capture or list of captures for every request,
  `queue_bytes`, the limit of bytes that wait for the sink, `call_seconds`, the longest time of a
  write or flush, and `close_seconds`, that of writing what is queued when the engine is closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.plan.control.controller import read_seconds
from midstream.plan.readouts.capture import Capture
from midstream.plan.sink_target import MEMORY, read_name
from midstream.validation import at, read_count, read_mapping, setting, show

# Half of it is flushed at once, which makes one shard of about the default size.
QUEUE_BYTES = 480 << 20
CALL_SECONDS = 120.0
CLOSE_SECONDS = 300.0

_PATH = "midstream.sinks"
# A comma separates settings only if another `name=` follows.
_BETWEEN = re.compile(r",(?=[a-z_]+=)")
_CLASS_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
# Sinks that were given as objects, by their token in plain settings. They stay in this process.
_INSTANCES: dict[str, object] = {}


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """Settings of one sink."""

    name: str
    own: Mapping[str, Any]
    captures: tuple[Capture, ...]  # of every request for this sink
    queue_bytes: int = QUEUE_BYTES  # limit for rows that wait to be written or flushed
    call_seconds: float = CALL_SECONDS  # longest time of a write, a flush, or its close
    close_seconds: float = CLOSE_SECONDS  # of what is queued, at the engine's end
    class_path: str = ""  # `package.module:Class`; empty: the class is found by the name
    instance: object = None  # None: it is made from its class


_WORD = "`name:setting=value`, such as store:root=acts"


@setting(_PATH)
def plain_sinks(value: object) -> dict[str, dict[str, Any]]:
    """Return the setting as plain JSON values: {name: {setting: value}}."""
    if isinstance(value, Mapping):
        listed = [(name, settings) for name, settings in value.items()]
    elif isinstance(value, (str, list, tuple)):
        listed = [_read_word(word) for word in ([value] if isinstance(value, str) else value)]
    else:
        raise SpecError(
            "",
            f"expected {{sink: settings}} or {_WORD}, got {show(value)}",
        )
    sinks: dict[str, dict[str, Any]] = {}
    for name, settings in listed:
        if name in sinks:
            raise SpecError("", f"sink {show(name)} is configured twice")
        try:
            read_name(name, may_be_empty=False)
        except SpecError as error:
            raise SpecError("", f"sink name: {error}") from None
        with at(name):
            sinks[name] = _plain(name, settings)
    return sinks


def read_sinks(plain: Mapping[str, Mapping[str, Any]]) -> tuple[SinkSettings, ...]:
    """Parse the result of `plain_sinks`, in its order."""
    sinks = []
    for name, settings in plain.items():
        with setting(f"{_PATH}.{name}"):
            sinks.append(_read(name, settings))
    return tuple(sinks)


def _read_word(word: object) -> tuple[str, dict[str, Any]]:
    """Parse `name` or `name:setting=value,setting=value`."""
    if not isinstance(word, str):
        raise SpecError("", f"expected {_WORD}, got {show(word)}")
    name, _, rest = word.partition(":")
    own: dict[str, Any] = {}
    for part in _BETWEEN.split(rest) if rest else ():
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise SpecError("", f"expected {_WORD}, got {show(word)}")
        if key in own:
            raise SpecError(f"{name}.{key}", f"given twice in {show(word)}")
        own[key] = _value(value)
    return name, own


def _value(text: str) -> Any:
    """Return the value of JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _plain(name: str, settings: object) -> dict[str, Any]:
    if isinstance(settings, str) and _CLASS_PATH.fullmatch(settings):
        settings = {"class": settings}
    elif isinstance(settings, str):
        _, settings = _read_word(f"{name}:{settings}")
    elif settings is None:
        settings = {}
    elif hasattr(settings, "write"):
        settings = {"instance": settings}
    settings = read_mapping(settings, "a dict of settings")
    if hasattr(settings.get("instance"), "write"):
        settings = {**settings, "instance": _token(settings["instance"])}
    elif not isinstance(settings.get("instance", ""), str):
        raise SpecError(
            "instance",
            f"expected a sink, which has a method `write`, got {show(settings['instance'])}",
        )
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(settings), default=_from_value))
    except (TypeError, ValueError) as error:
        raise SpecError("", f"settings must be JSON values: {error}") from None
    read = _read(name, plain)
    if read.captures:
        plain["capture"] = [capture.to_dict() for capture in read.captures]
    return plain


def _token(instance: object) -> str:
    token = f"{type(instance).__name__}-{id(instance):x}"
    _INSTANCES[token] = instance
    return token


def _from_value(value: object) -> object:
    if isinstance(value, Capture):
        return value.to_dict()
    if hasattr(value, "__fspath__"):
        return value.__fspath__()
    raise TypeError(f"got `{type(value).__name__}`")


def _read(name: str, settings: Mapping[str, Any]) -> SinkSettings:
    own = dict(settings)
    captures = own.pop("capture", None)
    with at("queue_bytes"):
        queue_bytes = read_count(own.pop("queue_bytes", QUEUE_BYTES))
    with at("call_seconds"):
        call_seconds = read_seconds(own.pop("call_seconds", CALL_SECONDS))
    with at("close_seconds"):
        close_seconds = read_seconds(own.pop("close_seconds", CLOSE_SECONDS))
    with at("capture"):
        captures = _read_captures(name, captures)
    if name == MEMORY and own:
        raise SpecError("", f"the only setting is `capture`, got {sorted(own)}")
    class_path, token = own.pop("class", ""), own.pop("instance", "")
    if "class" in settings and not (
        isinstance(class_path, str) and _CLASS_PATH.fullmatch(class_path)
    ):
        raise SpecError("class", f"expected `package.module:Class`, got {show(class_path)}")
    if "instance" in settings and (own or class_path):
        raise SpecError("instance", f"a sink that exists takes no {', '.join(own) or 'class'}")
    if "instance" in settings and token not in _INSTANCES:
        raise SpecError(
            "instance", f"expected a sink that was made in this process, got {show(token)}"
        )
    instance = _INSTANCES.get(token)
    return SinkSettings(
        name, own, captures, queue_bytes, call_seconds, close_seconds, class_path, instance
    )


def _read_captures(name: str, value: object) -> tuple[Capture, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        return (_read_capture(name, value),)
    captures = []
    for index, part in enumerate(value):
        with at(f"[{index}]"):
            captures.append(_read_capture(name, part))
    return tuple(captures)


def _read_capture(name: str, value: object) -> Capture:
    if isinstance(value, Mapping):
        value = {**value, "sink": value.get("sink", name)}
    capture = Capture.parse(value)
    if capture.sink != name:
        raise SpecError("sink", f"must be omitted or {name!r}")
    if capture.stream:
        raise SpecError("stream", "must be omitted; these rows arrive at a request's end")
    if capture.request_id:
        raise SpecError("request_id", "must be omitted; the capture is for all requests")
    return capture
