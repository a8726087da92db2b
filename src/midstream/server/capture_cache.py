"""Cache of captured rows that clients fetch later, limited in size and age."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from midstream.config.http import HttpSettings
from midstream.errors import HttpError


@dataclass(frozen=True, slots=True)
class CachedCapture:
    """Captured rows of one completion.

    Attributes:
        id: unguessable id, with which its client may fetch and delete the rows.
        client: id of the client that the rows belong to.
        request_id: vLLM's request id.
        file: descriptor of an anonymous memory file (memfd) with the rows as safetensors; freed
            with the process at the latest.
        nbytes: length of the file in bytes.
        expires_at: time of expiry, in seconds since the epoch.
        about: description of the rows, as in the response.
    """

    id: str
    client: str
    request_id: str
    file: int
    nbytes: int
    expires_at: float
    about: Mapping[str, Any]


class CaptureCache:
    """Cache of captured rows of one server. Thread-safe."""

    def __init__(self, settings: HttpSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        self._captures: dict[str, CachedCapture] = {}
        # By id, the rows that are read now, also after they were freed, and by how many readers:
        # their memory is in use until the last reader ends.
        self._read: dict[str, tuple[CachedCapture, int]] = {}
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all cached rows."""
        with self._lock:
            self._expire()
            return sum(one.nbytes for one in self._captures.values())

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._captures)

    def check(self, client: str) -> None:
        """Check that the cache has capacity, before a request starts.

        Raises:
            HttpError: 429, the client's limit is reached; 507, the server's limit is reached.
        """
        with self._lock:
            self._check(client, 1)

    def store(
        self, data: bytes, client: str, request_id: str, about: Mapping[str, Any]
    ) -> CachedCapture:
        """Store rows, and return their entry.

        Raises:
            HttpError: as for `check`; or 507, the machine has no memory or file left.
        """
        with self._lock:
            self._check(client, len(data))
        # The copy runs without the lock, so the capacity is checked again after it.
        try:
            file = _file_of(data)
        except OSError as error:
            raise HttpError(507, f"the rows cannot be cached: {error.strerror}") from None
        try:
            with self._lock:
                self._check(client, len(data))
                entry = CachedCapture(
                    secrets.token_urlsafe(24),
                    client,
                    request_id,
                    file,
                    len(data),
                    self._clock() + self._settings.held_seconds,
                    about,
                )
                self._captures[entry.id] = entry
        except HttpError:
            os.close(file)
            raise
        return entry

    def get(self, name: str) -> CachedCapture | None:
        """Return the entry of an id; None if the id is unknown or expired."""
        with self._lock:
            self._expire()
            return self._captures.get(name)

    def open(self, name: str) -> tuple[CachedCapture, int] | None:
        """Return the entry of an id with a new file descriptor, which the caller must give to
        `end_read`; None if the id is unknown or expired.
        """
        with self._lock:
            self._expire()
            entry = self._captures.get(name)
            if entry is None:
                return None
            _, readers = self._read.get(name, (entry, 0))
            self._read[name] = (entry, readers + 1)
            # Duplicate the descriptor: if the rows are freed meanwhile, the kernel may reuse the
            # number for another file.
            return entry, os.dup(entry.file)

    def end_read(self, entry: CachedCapture, file: int) -> None:
        """Close a descriptor that `open` returned."""
        with self._lock:
            os.close(file)
            _, readers = self._read.pop(entry.id)
            if readers > 1:
                self._read[entry.id] = (entry, readers - 1)

    def of_client(self, client: str) -> list[CachedCapture]:
        """Return a client's entries, oldest first."""
        with self._lock:
            self._expire()
            return [one for one in self._captures.values() if one.client == client]

    def delete(self, name: str) -> bool:
        """Free the rows of an id; return whether there were any."""
        with self._lock:
            self._expire()
            found = self._captures.pop(name, None)
            if found is not None:
                os.close(found.file)
            return found is not None

    def close(self) -> None:
        """Free all cached rows."""
        with self._lock:
            for one in self._captures.values():
                os.close(one.file)
            self._captures.clear()

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, one in self._captures.items() if one.expires_at <= now]:
            os.close(self._captures.pop(name).file)

    def _check(self, client: str, nbytes: int) -> None:
        self._expire()
        limits = self._settings
        # Rows that were freed while a client reads them take memory until it has read them.
        kept = {**self._captures, **{name: one for name, (one, _) in self._read.items()}}
        mine = [one.nbytes for one in kept.values() if one.client == client]
        if len(mine) >= limits.client_captures:
            raise HttpError(
                429,
                f"{len(mine)} captures are cached for this client, which is the limit "
                "(http.client_captures); fetch and delete some",
            )
        if sum(mine) + nbytes > limits.client_bytes:
            raise HttpError(
                429,
                f"{sum(mine)} bytes of captures are cached for this client, and {nbytes} more "
                f"exceed its limit of {limits.client_bytes}; fetch and delete some, or capture "
                "less",
            )
        if len(kept) >= limits.held_captures:
            raise HttpError(
                507,
                f"this server caches {len(kept)} captures, which is its limit "
                "(http.held_captures); try again later",
            )
        total = sum(one.nbytes for one in kept.values())
        if total + nbytes > limits.held_bytes:
            raise HttpError(
                507,
                f"this server caches {total} bytes of captures, and {nbytes} more exceed its limit "
                f"of {limits.held_bytes}; try again later, or capture less",
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
