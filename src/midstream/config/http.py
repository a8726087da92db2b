"""The setting `http`: limits on HTTP clients, and who may change vectors and steering."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from midstream.config.reader import check_mapping, check_names, read_bool, read_count
from midstream.errors import ConfigError

ADMIN_KEY_VARIABLE = "MIDSTREAM_ADMIN_KEY"
_PATH = "midstream.http"
_LOGS = ("text", "json")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits of one server.

    Attributes:
        admin: whether vectors and server-wide steering can be changed over HTTP. None: only if a
            key protects them, or if the server is bound to loopback.
        max_body_bytes: maximum length of a request body.
        inline_bytes: maximum bytes of tensors in one response.
        held_bytes: maximum bytes of captured rows cached for clients, in total.
        held_captures: maximum number of cached captures, in total. Each that was fetched, or is
            large, uses a file descriptor.
        client_bytes: maximum bytes of captured rows cached for one client.
        client_captures: maximum number of captures cached for one client.
        held_seconds: lifetime of a cached capture in seconds.
        vector_bytes: maximum bytes of registered vectors.
        waiting_requests: maximum number of requests with a plan that wait for capacity.
        wait_seconds: longest time in seconds that such a request waits.
        stall_seconds: longest time in seconds that a stream of a request with a plan, or of a
            sweep, waits for a client that reads nothing of it; then the request ends.
        sweep_cells: maximum number of cells of a sweep.
        running_sweeps: maximum number of sweeps and fits at the same time.
        sweep_wait_seconds: longest time in seconds that a run of a sweep or fit waits for ordinary
            requests, if no other run is under way.
        fit_prompts: maximum number of prompts of a fit, of both classes together.
        parameters: names of the model's parameters that clients may read, such as
            `lm_head.weight`. Embeddings, norms and the head are possible, the decoder layers are
            not.
        log: "text" or "json": form of midstream's own lines in the log.
        shared_folder: folder on this machine by which several servers have the same named vectors
            and server-wide steering; None: a server has its own.
        studio: whether the server has Studio, a page for browsers, at `/midstream`.
    """

    admin: bool | None = None
    max_body_bytes: int = 64 << 20
    inline_bytes: int = 16 << 20
    held_bytes: int = 4 << 30
    held_captures: int = 8192
    client_bytes: int = 1 << 30
    client_captures: int = 1024
    held_seconds: int = 600
    vector_bytes: int = 1 << 30
    waiting_requests: int = 1024
    wait_seconds: int = 120
    stall_seconds: int = 30
    sweep_cells: int = 1 << 16
    running_sweeps: int = 4
    sweep_wait_seconds: int = 1
    fit_prompts: int = 4096
    parameters: tuple[str, ...] = ()
    log: str = "text"
    shared_folder: str | None = None
    studio: bool = False


def read_http(value: object) -> HttpSettings | None:
    """Return the settings of a server; None if midstream is disabled over HTTP.

    Args:
        value: True or None: the defaults; False: disabled; or a dict of fields.

    Raises:
        ConfigError: another type, an unknown setting, or an invalid value.
    """
    if value is False:
        return None
    if value is None or value is True:
        return HttpSettings()
    settings = check_mapping(_PATH, value, "true, false or a dict of settings")
    check_names(_PATH, settings, (each.name for each in fields(HttpSettings)))
    for name, given in settings.items():
        if name == "parameters":
            _check_parameters(given)
        elif name == "shared_folder":
            _check_folder(given)
        elif name == "log":
            if given not in _LOGS:
                raise ConfigError(f"{_PATH}.log: expected one of {', '.join(_LOGS)}, got {given!r}")
        elif name in ("admin", "studio"):
            if name == "studio" or given is not None:
                read_bool(f"{_PATH}.{name}", given)
        else:
            read_count(f"{_PATH}.{name}", given)
    found = HttpSettings(**settings)
    return replace(found, parameters=tuple(found.parameters))


def _check_parameters(value: object) -> None:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise ConfigError(
            f"{_PATH}.parameters: expected a list of names such as lm_head.weight, got {value!r}"
        )


def _check_folder(value: object) -> None:
    if value is not None and (not isinstance(value, str) or not os.path.isabs(value)):
        raise ConfigError(f"{_PATH}.shared_folder: expected an absolute path, got {value!r}")


# Limits of a server that each of its API server processes has an equal part of.
_DIVIDED = (
    "held_bytes", "held_captures", "client_bytes", "client_captures", "waiting_requests",
    "running_sweeps",
)  # fmt: skip


def divided(settings: HttpSettings, processes: int) -> HttpSettings:
    """Return the limits of one of several API server processes."""
    parts = {name: max(1, getattr(settings, name) // processes) for name in _DIVIDED}
    return replace(settings, **parts)


def plain_http(settings: HttpSettings | None) -> bool | dict[str, Any]:
    """Return the JSON form of the settings."""
    if settings is None:
        return False
    return {**asdict(settings), "parameters": list(settings.parameters)}


def admin_key() -> str | None:
    """Return the key in `MIDSTREAM_ADMIN_KEY`; None if it is unset or empty."""
    return os.environ.get(ADMIN_KEY_VARIABLE) or None


def url_of_environment() -> str | None:
    """Return the server in `MIDSTREAM_BASE_URL`; None if it is unset or empty."""
    return os.environ.get("MIDSTREAM_BASE_URL") or None


ADMIN_HEADER = "x-midstream-admin-key"
