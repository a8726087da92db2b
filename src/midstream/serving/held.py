"""Captured rows that are held for clients to fetch, for a while and up to a limit."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from midstream.serving.refusals import Refusal
from midstream.serving.settings import HttpSettings


@dataclass(frozen=True, slots=True)
class Held:
    """One completion's rows.

    Attributes:
        id: cannot be guessed; who knows it may fetch and delete them.
        client: whose they are.
        request_id: vLLM's.
        file: descriptor of memory without a name that has them as a safetensors file; it is gone
            with this process.
        nbytes: how long that is.
        expires_at: seconds since the epoch.
        about: what the answer says of them.
    """

    id: str
    client: str
    request_id: str
    file: int
    nbytes: int
    expires_at: float
    about: Mapping[str, Any]


class Holding:
    """What one server holds. For any thread."""

    def __init__(self, settings: HttpSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        with self._lock:
            self._expire()
            return sum(one.nbytes for one in self._held.values())

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._held)

    def check(self, client: str) -> None:
        """Whether there is any room, before a request is begun.

        Raises:
            Refusal: 429, the client holds as much as it may; 507, there is none for anybody.
        """
        with self._lock:
            self._check(client, 1)

    def hold(self, data: bytes, client: str, request_id: str, about: Mapping[str, Any]) -> Held:
        """Holds rows from now on.

        Raises:
            Refusal: as `check`.
        """
        with self._lock:
            self._check(client, len(data))
        # Others go on while it is copied; whether there is room still is looked at after that.
        file = _file_of(data)
        try:
            with self._lock:
                self._check(client, len(data))
                held = Held(
                    secrets.token_urlsafe(24),
                    client,
                    request_id,
                    file,
                    len(data),
                    self._clock() + self._settings.held_seconds,
                    about,
                )
                self._held[held.id] = held
        except Refusal:
            os.close(file)
            raise
        return held

    def open(self, name: str) -> tuple[Held, int] | None:
        """What is held under an id, and a descriptor of its file that is the caller's to close;
        None: nothing, or it has expired.
        """
        with self._lock:
            self._expire()
            held = self._held.get(name)
            # A descriptor of its own: should the rows go meanwhile, their number may stand for
            # others.
            return None if held is None else (held, os.dup(held.file))

    def of(self, client: str) -> list[Held]:
        """What is held for a client, oldest first."""
        with self._lock:
            self._expire()
            return [one for one in self._held.values() if one.client == client]

    def delete(self, name: str) -> bool:
        """Lets go of it; whether there was anything."""
        with self._lock:
            self._expire()
            found = self._held.pop(name, None)
            if found is not None:
                os.close(found.file)
            return found is not None

    def close(self) -> None:
        """Lets go of everything."""
        with self._lock:
            for one in self._held.values():
                os.close(one.file)
            self._held.clear()

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, one in self._held.items() if one.expires_at <= now]:
            os.close(self._held.pop(name).file)

    def _check(self, client: str, nbytes: int) -> None:
        self._expire()
        limits = self._settings
        mine = [one.nbytes for one in self._held.values() if one.client == client]
        if len(mine) >= limits.client_captures:
            raise Refusal(
                429,
                f"{len(mine)} captures are held for this client, and no more may be; fetch and "
                "delete some",
            )
        if sum(mine) + nbytes > limits.client_bytes:
            raise Refusal(
                429,
                f"{sum(mine)} bytes of captures are held for this client, and {nbytes} more pass "
                f"the limit of {limits.client_bytes}; fetch and delete some, or capture less",
            )
        if len(self._held) >= limits.held_captures:
            raise Refusal(
                507,
                f"this server holds {len(self._held)} captures, and no more may be; try again "
                "later",
            )
        total = sum(one.nbytes for one in self._held.values())
        if total + nbytes > limits.held_bytes:
            raise Refusal(
                507,
                f"this server holds {total} bytes of captures, and {nbytes} more pass its limit of "
                f"{limits.held_bytes}; try again later, or capture less",
            )


def _file_of(data: bytes) -> int:
    file = os.memfd_create("midstream-held", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
    except BaseException:
        os.close(file)
        raise
    return file
