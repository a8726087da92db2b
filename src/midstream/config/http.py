"""The setting `http`: limits on HTTP clients, and who may change vectors and steering."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, to_builtins
from msgspec.structs import replace

from midstream.errors import SpecError
from midstream.validation import read_mapping, read_struct, setting, show

ADMIN_KEY_VARIABLE = "MIDSTREAM_ADMIN_KEY"
Count = Annotated[int, Meta(ge=1)]


class HttpSettings(Struct, frozen=True):
    """Limits of one server.

    Attributes:
        admin: whether vectors, guards and server-wide steering can be changed over HTTP. None: only
            if a key protects them, or if the server is bound to loopback.
        max_body_bytes: maximum length of a request body.
        inline_bytes: maximum bytes of tensors in one response.
        held_bytes: maximum bytes of captured rows cached for clients, in total.
        held_captures: maximum number of cached captures, in total. Each that was fetched, or is
            large, uses a file descriptor.
        client_bytes: maximum bytes of captured rows cached for one client.
        client_captures: maximum number of captures cached for one client.
        held_seconds: lifetime of a cached capture in seconds.
        vector_bytes: maximum bytes of registered vectors, and of all versions of guards.
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
        shared_folder: folder on this machine by which several servers have the same named vectors,
            guards and server-wide steering, and a restarted one has them again; None: a server has
            its own.
        studio: whether the server has Studio, a page for browsers, at `/midstream`.
    """

    admin: bool | None = None
    max_body_bytes: Count = 64 << 20
    inline_bytes: Count = 16 << 20
    held_bytes: Count = 4 << 30
    held_captures: Count = 8192
    client_bytes: Count = 1 << 30
    client_captures: Count = 1024
    held_seconds: Count = 600
    vector_bytes: Count = 1 << 30
    waiting_requests: Count = 1024
    wait_seconds: Count = 120
    stall_seconds: Count = 30
    sweep_cells: Count = 1 << 16
    running_sweeps: Count = 4
    sweep_wait_seconds: Count = 1
    fit_prompts: Count = 4096
    parameters: tuple[str, ...] = ()
    log: Literal["text", "json"] = "text"
    shared_folder: str | None = None
    studio: bool = False


@setting("midstream.http")
def read_http(value: object) -> HttpSettings | None:
    """Return the settings of a server, of a dict, True or None; None if False disables it."""
    if value is False:
        return None
    if value is None or value is True:
        return HttpSettings()
    settings = read_struct(HttpSettings, read_mapping(value, "true, false or a dict of settings"))
    if settings.shared_folder is not None and not os.path.isabs(settings.shared_folder):
        raise SpecError(
            "shared_folder", f"expected an absolute path, got {show(settings.shared_folder)}"
        )
    return settings


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
    if settings is None:
        return False
    return {**to_builtins(settings), "parameters": list(settings.parameters)}


def admin_key() -> str | None:
    """Return the key in `MIDSTREAM_ADMIN_KEY`; None if it is unset or empty."""
    return os.environ.get(ADMIN_KEY_VARIABLE) or None


def url_of_environment() -> str | None:
    """Return the server in `MIDSTREAM_BASE_URL`; None if it is unset or empty."""
    return os.environ.get("MIDSTREAM_BASE_URL") or None


ADMIN_HEADER = "x-midstream-admin-key"
