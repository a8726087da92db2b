"""Authorization: changes that affect all clients, and requests of web pages of elsewhere."""

from __future__ import annotations

import functools
import hashlib
import ipaddress
import secrets
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from midstream.config.http import ADMIN_HEADER, ADMIN_KEY_VARIABLE
from midstream.errors import HttpError


class Guard:
    """Checks a server's requests. Web pages reach every server that the browser does, but know no
    key: what a key protects is checked by it, all else by the hosts that it names.
    """

    def __init__(
        self,
        *,
        allowed: bool | None,  # the setting `http.admin`
        admin_key: str | None,  # None: every client of the server may make changes
        has_key: bool,  # whether vLLM checks an API key before
        host: str | None,  # that the server is bound to; None: all interfaces
        origins: Collection[str] = (),  # whose web pages may use the server; "*" names none
    ) -> None:
        self._admin_digest = None if admin_key is None else _digest(admin_key)
        self._has_key = has_key
        self._allowed = allowed
        self._is_loopback = is_loopback(host)
        self._origins = frozenset(origins) - {"*"}
        is_protected = admin_key is not None or has_key or self._is_loopback
        self.is_open = is_protected if allowed is None else allowed

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Check the hosts of a request to a loopback server without a key: a page may let its name
        lead here (DNS rebinding), and vLLM lets all origins read (CORS).
        """
        if not self._is_loopback or self._has_key:
            return
        host = headers.get("host")
        if host and not _is_local(f"//{host}") and not self._has_admin_key(headers):
            raise HttpError(
                403,
                "this server has no API key and answers requests to local hosts only, not to "
                f"{host[:200]!r}; start it with --api-key, or have a proxy send it the header "
                "Host: localhost",
            )
        self._check_origin(headers)

    def check(self, headers: Mapping[str, str]) -> None:
        """Check that a request, its header names in lower case, may change vectors or steering."""
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
                "bound to loopback; start it with --host 127.0.0.1, --api-key, "
                f"{ADMIN_KEY_VARIABLE}, or midstream's setting http.admin=true",
            )
        if self._admin_digest is None:
            self._check_origin(headers)
        elif not self._has_admin_key(headers):
            raise HttpError(401, f"expected the admin key, in the header {ADMIN_HEADER}")

    def _check_origin(self, headers: Mapping[str, str]) -> None:
        """Check the origin of a request that no key protects."""
        origin = headers.get("origin")
        if origin is None or self._has_key or origin in self._origins or _is_local(origin):
            return
        # A server that the network reaches does not know its own names: a page that it served
        # itself has the name that its requests are sent to.
        own = None if self._is_loopback else _hostname(f"//{headers.get('host', '')}")
        if own is not None and _hostname(origin) == own:
            return
        if not self._has_admin_key(headers):
            raise HttpError(
                403,
                "this server has no key and answers web pages of local origins only, not of "
                f"{origin[:200]!r}; start it with --api-key, or name the origin in "
                "--allowed-origins",
            )

    def _has_admin_key(self, headers: Mapping[str, str]) -> bool:
        if self._admin_digest is None:
            return False
        scheme, _, key = headers.get("authorization", "").partition(" ")
        sent = headers.get(ADMIN_HEADER) or (key if scheme.lower() == "bearer" else "")
        return secrets.compare_digest(_digest(sent), self._admin_digest)


def is_loopback(host: str | None) -> bool:
    """Return whether a server bound to `host` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@functools.lru_cache(maxsize=64)  # most clients name the server alike
def _is_local(origin: str) -> bool:
    """Return whether the URL of an `Origin` or `Host` header names a server on this machine."""
    return is_loopback(_hostname(origin))


def _hostname(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
