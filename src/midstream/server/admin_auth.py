"""Authorization of changes that affect all clients: named vectors and server-wide steering."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from midstream.config.http import ADMIN_HEADER, ADMIN_KEY_VARIABLE
from midstream.errors import HttpError


class Guard:
    """Checks the admin key of one server."""

    def __init__(
        self, *, allowed: bool | None, admin_key: str | None, has_key: bool, host: str | None
    ) -> None:
        """Create a guard for one server.

        Args:
            allowed: the setting `http.admin`.
            admin_key: key that authorizes changes; None: every client of the server may make
                changes.
            has_key: whether vLLM checks an API key before requests reach midstream.
            host: host that the server is bound to; None: all interfaces.
        """
        self._key = None if admin_key is None else _digest(admin_key)
        has_keys = self._key is not None or has_key
        self._allowed = allowed
        # Without a key, every process on this machine may make changes, but web pages of other
        # origins shown by a local browser may not (cross-site request forgery).
        self._is_local = allowed is None and not has_keys
        self._is_loopback = is_loopback(host)
        self.is_open = has_keys or is_loopback(host) if allowed is None else allowed

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Check that a request to a loopback-bound server without a key is addressed to this
        machine: a web page may let its own name lead here (DNS rebinding).

        Raises:
            HttpError: 403, the header `Host` names another host.
        """
        host = headers.get("host")
        if self._is_local and self._is_loopback and host and not _is_own(f"//{host}"):
            raise HttpError(
                403,
                f"this server has no key and answers requests to local hosts only, not to "
                f"{host[:200]!r}; start it with --api-key or {ADMIN_KEY_VARIABLE}, or with "
                "midstream's setting http.admin",
            )

    def check(self, headers: Mapping[str, str]) -> None:
        """Check that a request may change vectors or steering.

        Args:
            headers: the request's headers, keys in lower case.

        Raises:
            HttpError: 403, changes are disabled, or the request comes from a web page of another
                origin; 401, the admin key is missing or wrong.
        """
        if self._allowed is False:
            raise HttpError(
                403,
                "vectors and steering cannot be changed on this server: midstream's setting "
                "http.admin is false",
            )
        if not self.is_open:
            raise HttpError(
                403,
                "vectors and steering cannot be changed on this server: it has no key and is not "
                f"bound to loopback; start it with --api-key, {ADMIN_KEY_VARIABLE}, or midstream's "
                "setting http.admin=true",
            )
        origin = headers.get("origin")
        if self._is_local and origin is not None and not _is_own(origin):
            raise HttpError(
                403,
                f"vectors and steering cannot be changed from origin {origin[:200]!r}: this server "
                "has no key and accepts changes from local origins only; start it with --api-key "
                f"or {ADMIN_KEY_VARIABLE}",
            )
        if self._key is None:
            return
        given = headers.get(ADMIN_HEADER) or _bearer(headers.get("authorization", ""))
        if not secrets.compare_digest(_digest(given), self._key):
            raise HttpError(401, f"expected the admin key, in the header {ADMIN_HEADER}")


def is_loopback(host: str | None) -> bool:
    """Return whether a server bound to `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@functools.lru_cache(maxsize=64)  # most clients name the server alike
def _is_own(origin: str) -> bool:
    """Return whether the URL of an `Origin` or `Host` header names a server on this machine."""
    try:
        return is_loopback(urlsplit(origin).hostname)
    except ValueError:
        return False


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
