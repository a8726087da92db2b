"""The setting `http`: what the server lets clients ask for, and how much it keeps for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from midstream.config import hint
from midstream.errors import ConfigError

ADMIN_KEY_VARIABLE = "MIDSTREAM_ADMIN_KEY"
_PATH = "midstream.http"


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits of one server.

    Attributes:
        admin: whether vectors and server-wide steering may be changed over HTTP. None: where a key
            guards them, or where the server is bound to loopback only.
        max_body_bytes: how long the body of a request may be.
        inline_bytes: how many bytes of tensors one answer may have.
        held_bytes: how many bytes of captured rows are held for clients to fetch, in all.
        held_captures: how many captures are held, in all; each takes a file descriptor.
        client_bytes, client_captures: of these, for one client.
        held_seconds: how long they are held.
        vector_bytes: how many bytes of registered vectors there may be.
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


def read_http(value: object) -> HttpSettings | None:
    """The settings of a server; None: nothing is served.

    Args:
        value: True or None: the defaults; False: nothing; or a dict of fields.

    Raises:
        ConfigError: another form, an unknown setting, or a value that is not allowed.
    """
    if value is False:
        return None
    if value is None or value is True:
        return HttpSettings()
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{_PATH}: expected true, false or a dict of settings, got `{type(value).__name__}` "
            f"{value!r}"
        )
    known = {each.name for each in fields(HttpSettings)}
    for name, given in value.items():
        if name not in known:
            raise ConfigError(f"{_PATH}.{name}: no such setting{hint(name, known)}")
        if name == "admin":
            if not isinstance(given, bool | None):
                raise ConfigError(f"{_PATH}.admin: expected true or false, got {given!r}")
        elif isinstance(given, bool) or not isinstance(given, int) or given < 1:
            raise ConfigError(f"{_PATH}.{name}: expected `int` of at least 1, got {given!r}")
    return HttpSettings(**value)


def plain_http(settings: HttpSettings | None) -> bool | dict[str, Any]:
    """The JSON form."""
    if settings is None:
        return False
    return {each.name: getattr(settings, each.name) for each in fields(HttpSettings)}


def admin_key() -> str | None:
    """The key that `MIDSTREAM_ADMIN_KEY` sets; None: there is none."""
    return os.environ.get(ADMIN_KEY_VARIABLE) or None
