"""Who may change what every client gets: vectors and server-wide steering."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Mapping
from urllib.parse import urlsplit

from midstream.serving.refusals import Refusal
from midstream.serving.settings import ADMIN_KEY_VARIABLE

ADMIN_HEADER = "x-midstream-admin-key"


class Guard:
    """Decides it, for one server."""

    def __init__(
        self, *, allowed: bool | None, admin_key: str | None, has_key: bool, host: str | None
    ) -> None:
        """Args:
        allowed: the setting `admin`.
        admin_key: the key of those who may; None: whoever may use the server.
        has_key: whether the server has a key, which vLLM asks for before a request comes here.
        host: what it is bound to; None: everything.
        """
        self._key = None if admin_key is None else _digest(admin_key)
        has_keys = self._key is not None or has_key
        self._allowed = allowed
        # Without a key, whoever is on this machine may; pages that a browser there shows may not.
        self._is_local = allowed is None and not has_keys
        self.is_open = has_keys or is_loopback(host) if allowed is None else allowed

    def check(self, headers: Mapping[str, str]) -> None:
        """Whether a request may change something.

        Args:
            headers: its own, by lower-case name.

        Raises:
            Refusal: 403, nobody may, or a page of another place; 401, it has not the key.
        """
        if self._allowed is False:
            raise Refusal(
                403,
                "vectors and steering cannot be changed on this server: midstream's setting "
                "http.admin is false",
            )
        if not self.is_open:
            raise Refusal(
                403,
                "vectors and steering cannot be changed on this server: it has no key and is bound "
                f"beyond loopback; start it with --api-key, {ADMIN_KEY_VARIABLE}, or midstream's "
                "setting http.admin=true",
            )
        origin = headers.get("origin")
        if self._is_local and origin is not None and not _is_own(origin):
            raise Refusal(
                403,
                f"vectors and steering cannot be changed from {origin[:200]!r}: this server has no "
                f"key, and trusts this machine alone; start it with --api-key or "
                f"{ADMIN_KEY_VARIABLE}",
            )
        if self._key is None:
            return
        given = headers.get(ADMIN_HEADER) or _bearer(headers.get("authorization", ""))
        if not secrets.compare_digest(_digest(given), self._key):
            raise Refusal(401, f"expected the admin key, in the header {ADMIN_HEADER}")


def is_loopback(host: str | None) -> bool:
    """Whether only this machine reaches a server bound to a host."""
    if host == "localhost":
        return True
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_own(origin: str) -> bool:
    """Whether a page is of a server of this machine, by its header `Origin`."""
    try:
        return is_loopback(urlsplit(origin).hostname)
    except ValueError:
        return False


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
