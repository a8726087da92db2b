"""Who may change what every client gets: vectors and server-wide steering."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Mapping

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
        is_safe = self._key is not None or has_key or is_loopback(host)
        self.is_open = is_safe if allowed is None else allowed

    def check(self, headers: Mapping[str, str]) -> None:
        """Whether a request may change something.

        Args:
            headers: its own, by lower-case name.

        Raises:
            Refusal: 403, nobody may; 401, it has not the key.
        """
        if not self.is_open:
            raise Refusal(
                403,
                "vectors and steering cannot be changed on this server: it has no key and is bound "
                f"beyond loopback; start it with --api-key, {ADMIN_KEY_VARIABLE}, or midstream's "
                "setting http.admin=true",
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


def _bearer(value: str) -> str:
    scheme, _, key = value.partition(" ")
    return key if scheme.lower() == "bearer" else ""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
