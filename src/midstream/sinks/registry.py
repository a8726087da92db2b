"""Registry of sinks by name: built-in ones, and those of other packages by entry points."""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from midstream.config.sinks import SinkSettings
from midstream.errors import ConfigError
from midstream.plan.sink_target import MEMORY
from midstream.sinks.base import Sink

GROUP = "midstream.sinks"
BUILTIN = {
    "filesystem": "midstream.sinks.files:FileSink",
    "log": "midstream.sinks.log:LogSink",
    "npz": "midstream.sinks.files:FileSink",
    "store": "midstream.sinks.store_sink:StoreSink",
    "tcp": "midstream.sinks.tcp:TcpSink",
}


def make_sink(settings: SinkSettings) -> Sink:
    path = f"midstream.sinks.{settings.name}"
    if (settings.class_path or settings.instance is not None) and settings.name in BUILTIN:
        raise ConfigError(f"{path}: the name of a built-in sink; use another name")
    if settings.instance is not None:
        if not isinstance(settings.instance, Sink):
            raise ConfigError(f"{path}: {settings.instance!r} is not a midstream.sinks.Sink")
        return settings.instance
    cls = _import(path, settings.class_path) if settings.class_path else _find(settings.name)
    signature = inspect.signature(cls)
    try:
        signature.bind(**settings.own)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "no settings"
        raise ConfigError(f"{path}: {error}; the sink takes {takes}") from None
    try:
        return cls(**settings.own)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def _import(path: str, class_path: str) -> type[Sink]:
    module, _, name = class_path.partition(":")
    try:
        cls: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path}.class: {class_path} cannot be imported: {error}") from error
    return _checked(path, cls)


def _find(name: str) -> type[Sink]:
    plugins = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name in BUILTIN and name in plugins:
        raise ConfigError(
            f"midstream.sinks.{name}: {plugins[name].value} has the name of a built-in sink; "
            "rename it"
        )
    known = plugins | {key: EntryPoint(key, path, GROUP) for key, path in BUILTIN.items()}
    if name not in known:
        names = ", ".join(sorted({MEMORY, *known}))
        raise ConfigError(f"midstream.sinks.{name}: unknown sink; known: {names}")
    return _checked(f"midstream.sinks.{name}", known[name].load())


def _checked(path: str, cls: Any) -> type[Sink]:
    if not (isinstance(cls, type) and issubclass(cls, Sink)):
        raise ConfigError(f"{path}: {cls!r} is not a subclass of midstream.sinks.Sink")
    return cls
