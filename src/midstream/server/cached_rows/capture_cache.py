"""Cache of captured rows that clients fetch later, limited in size and age."""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from midstream.config.http import HttpSettings
from midstream.errors import HttpError
from midstream.plan.vectors.device_row import DeviceSource
from midstream.results.serialization import PackedRows

# Interval of the search for rows whose time is over.
_EXPIRY_SECONDS = 1.0
# Descriptors: fetched rows take one; whoever reads them takes another, and a file of its own.
ENTRY, READER = 1, 2
_SHARE = 2  # of the process's files, one of so many are for cached rows; of these, for one client
_UNLIMITED = 1 << 20


@dataclass(frozen=True, slots=True)
class CachedCapture:
    """Captured rows of one completion."""

    id: str  # unguessable: its client may fetch and delete the rows with it
    client: str
    request_id: str
    nbytes: int  # of the rows as safetensors
    expires_at: float  # in seconds since the epoch
    about: Mapping[str, Any]  # description of the rows, as in the response


@dataclass(eq=False, slots=True)
class _Kept:
    """Memory of an entry, in use until its last reader ends."""

    entry: CachedCapture
    rows: PackedRows | None  # that nobody has fetched yet; None: they are in `file`
    file: int | None = None  # memfd with the rows as safetensors; None: not fetched, or freed
    readers: int = 0
    source: DeviceSource | None = None  # keeps its rows on the device; None: there are none

    def free(self) -> None:
        """Free the rows, except for readers that have a descriptor of their own."""
        self.rows = self.source = None
        if self.file is not None:
            os.close(self.file)
            self.file = None


@dataclass(slots=True)
class _Usage:
    """Entries that take memory, of one client or of all, with those that room is reserved for."""

    captures: int = 0
    nbytes: int = 0


@dataclass(eq=False, slots=True)
class Reservation:
    """Room for the captures of a request that is computed."""

    client: str
    left: int  # captures that were not stored yet


class DescriptorBudget:
    """Descriptors that cached rows may take, so that clients can connect. Not thread-safe."""

    def __init__(self) -> None:
        self._of_client: Counter[str] = Counter()
        self.used = 0

    def check(self, client: str, count: int) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # it may change meanwhile
        files = _UNLIMITED if limit == resource.RLIM_INFINITY else limit
        most = files // _SHARE
        mine = most // _SHARE
        taken = self._of_client[client]
        if taken + count > mine:
            raise HttpError(
                429,
                f"the captures cached for this client take {taken} file descriptors, and {count} "
                f"more exceed its limit of {mine}, a part of the {files} files that this server "
                "may have open; fetch and delete some",
            )
        if self.used + count > most:
            raise HttpError(
                507,
                f"the captures that this server caches take {self.used} file descriptors, and "
                f"{count} more exceed the limit of {most}, a part of the {files} files that it may "
                "have open; try again later, or raise the server's limit (ulimit -n)",
            )

    def add(self, client: str, count: int) -> None:
        """Count descriptors that a client takes, or with a negative number gives back."""
        self._of_client[client] += count
        self.used += count
        if not self._of_client[client]:
            del self._of_client[client]


class CaptureCache:
    """Cache of captured rows of one server, packed when they are first fetched. Thread-safe."""

    def __init__(self, settings: HttpSettings, clock: Callable[[], float] = time.time) -> None:
        self._settings = settings
        self._clock = clock
        # In the order in which they expire.
        self._captures: OrderedDict[str, _Kept] = OrderedDict()
        # Entries that are read now, also after they were freed.
        self._read: dict[str, _Kept] = {}
        # What takes memory: the entries, and rows that were freed while a client reads them.
        self._all = _Usage()
        self._of_client: dict[str, _Usage] = {}
        self._descriptors = DescriptorBudget()
        self._reader_of: dict[int, str] = {}  # client by the descriptor that `open` returned
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            self._expire()
            return sum(capture.entry.nbytes for capture in self._captures.values())

    def __len__(self) -> int:
        with self._lock:
            self._expire()
            return len(self._captures)

    def reserve(self, client: str, captures: int) -> Reservation:
        """Reserve room for the captures of a request, before it starts; pair with `release`."""
        with self._lock:
            self._check(client, captures, captures)
            self._count(client, captures, 0)
        return Reservation(client, captures)

    def release(self, reservation: Reservation) -> None:
        """Give back the room of captures that were not stored."""
        with self._lock:
            left, reservation.left = reservation.left, 0
            if left:
                self._count(reservation.client, -left, 0)

    @property
    def is_due(self) -> bool:
        with self._lock:
            first = next(iter(self._captures.values()), None)
            return first is not None and first.entry.expires_at <= self._clock()

    def expire(self) -> None:
        with self._lock:
            self._expire()

    def store(
        self,
        rows: PackedRows | bytes,
        client: str,
        request_id: str,
        about: Mapping[str, Any],
        reservation: Reservation | None = None,
    ) -> CachedCapture:
        """Store rows and return their entry. Bytes are copied, others kept until fetched."""
        nbytes = len(rows) if isinstance(rows, bytes) else rows.nbytes
        file = None
        if isinstance(rows, bytes):
            with self._lock:
                self._check(client, nbytes, 0 if reservation and reservation.left else 1)
            # The copy runs without the lock, so the capacity is checked again after it.
            file = file_of(rows)
        try:
            with self._lock:
                new = 0 if reservation and reservation.left else 1
                self._check(client, nbytes, new)
                expiry = self._clock() + self._settings.held_seconds
                name = secrets.token_urlsafe(24)
                entry = CachedCapture(name, client, request_id, nbytes, expiry, about)
                unpacked = None if isinstance(rows, bytes) else rows
                self._captures[entry.id] = _Kept(entry, unpacked, file)
                self._count(client, new, nbytes)
                if reservation and reservation.left:
                    reservation.left -= 1
        except HttpError:
            if file is not None:
                os.close(file)
            raise
        return entry

    def hold(self, entry: CachedCapture, source: DeviceSource | None) -> None:
        """Keep rows on the device until the entry's own are freed."""
        with self._lock:
            kept = self._captures.get(entry.id)
            if kept is not None:
                kept.source = source

    def get(self, name: str) -> CachedCapture | None:
        """Return the entry of an id; None if the id is unknown or expired."""
        with self._lock:
            self._expire()
            return self._captures[name].entry if name in self._captures else None

    def open(self, name: str, client: str) -> tuple[CachedCapture, int] | None:
        """Return an entry and a descriptor for `end_read`; None: unknown or expired."""
        with self._lock:
            self._expire()
            if name not in self._captures:
                return None
            self._descriptors.check(client, READER)
            self._descriptors.add(client, READER)
        opened = None
        try:
            opened = self._open(name, client)
        finally:
            if opened is None:
                with self._lock:
                    self._descriptors.add(client, -READER)
        return opened

    def _open(self, name: str, client: str) -> tuple[CachedCapture, int] | None:
        """Do what `open` does, whose descriptors are counted."""
        with self._lock:
            kept = self._captures.get(name)
            rows = None if kept is None else kept.rows
        # The rows are packed without the lock. If two readers do it at once, one file is closed.
        made = None if rows is None else file_of(rows.tobytes())
        with self._lock:
            if made is not None and kept is not None and kept.rows is not None:
                kept.file, kept.rows, made = made, None, None
            if made is not None:
                os.close(made)
            if kept is None or kept.file is None:
                return None
            # Duplicate the descriptor: if the rows are freed meanwhile, the kernel may reuse the
            # number for another file.
            try:
                file = os.dup(kept.file)
            except OSError as error:
                raise _no_memory(error) from None
            kept.readers += 1
            self._read[name] = kept
            self._reader_of[file] = client
            return kept.entry, file

    def end_read(self, entry: CachedCapture, file: int) -> None:
        with self._lock:
            os.close(file)
            self._descriptors.add(self._reader_of.pop(file), -READER)
            kept = self._read[entry.id]
            kept.readers -= 1
            if not kept.readers:
                del self._read[entry.id]
                if entry.id not in self._captures:
                    self._count(entry.client, -1, -entry.nbytes)

    def of_client(self, client: str) -> list[CachedCapture]:
        with self._lock:
            self._expire()
            every = [capture.entry for capture in self._captures.values()]
            return [entry for entry in every if entry.client == client]

    def delete(self, name: str) -> bool:
        """Free the rows of an id; return whether there were any."""
        with self._lock:
            self._expire()
            return self._remove(name)

    def close(self) -> None:
        with self._lock:
            for name in list(self._captures):
                self._remove(name)

    def _remove(self, name: str) -> bool:
        kept = self._captures.pop(name, None)
        if kept is None:
            return False
        kept.free()
        if not kept.readers:
            self._count(kept.entry.client, -1, -kept.entry.nbytes)
        return True

    def _expire(self) -> None:
        now = self._clock()
        while self._captures:
            name, first = next(iter(self._captures.items()))
            if first.entry.expires_at > now:
                return
            self._remove(name)

    def _count(self, client: str, captures: int, nbytes: int) -> None:
        """Count captures, and their bytes, that take memory from now on; negative: no longer."""
        mine = self._of_client.setdefault(client, _Usage())
        for usage in (mine, self._all):
            usage.captures += captures
            usage.nbytes += nbytes
        if not mine.captures:
            del self._of_client[client]
        self._descriptors.add(client, ENTRY * captures)

    def _check(self, client: str, nbytes: int, captures: int = 1) -> None:
        self._expire()
        mine = self._of_client.get(client, _Usage())
        _check_limits(self._settings, mine, self._all, nbytes, captures)
        if captures:
            self._descriptors.check(client, ENTRY * captures)


async def expire_in_time(captures: CaptureCache) -> None:
    """Free rows whose time is over, until this is cancelled, whether or not the cache is asked."""
    while True:
        await asyncio.sleep(_EXPIRY_SECONDS)
        if captures.is_due:
            # To free gigabytes takes time.
            await asyncio.to_thread(captures.expire)


def file_of(data: bytes) -> int:
    try:
        file = os.memfd_create("midstream-held", os.MFD_CLOEXEC)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(file, view) :]
        except BaseException:
            os.close(file)
            raise
    except OSError as error:
        raise _no_memory(error) from None
    return file


def _no_memory(error: OSError) -> HttpError:
    return HttpError(507, f"the rows cannot be cached: {error.strerror}")


def _check_limits(
    limits: HttpSettings, mine: _Usage, every: _Usage, nbytes: int, captures: int
) -> None:
    if mine.captures + captures > limits.client_captures:
        raise HttpError(
            429,
            f"{mine.captures} captures are cached for this client, and {captures} more exceed "
            f"its limit of {limits.client_captures} (http.client_captures); fetch and delete "
            "some",
        )
    if mine.nbytes + nbytes > limits.client_bytes:
        raise HttpError(
            429,
            f"{mine.nbytes} bytes of captures are cached for this client, and {nbytes} more "
            f"exceed its limit of {limits.client_bytes}; fetch and delete some, or capture "
            "less",
        )
    if every.captures + captures > limits.held_captures:
        raise HttpError(
            507,
            f"this server caches {every.captures} captures, and {captures} more exceed its "
            f"limit of {limits.held_captures} (http.held_captures); try again later",
        )
    if every.nbytes + nbytes > limits.held_bytes:
        raise HttpError(
            507,
            f"this server caches {every.nbytes} bytes of captures, and {nbytes} more exceed "
            f"its limit of {limits.held_bytes}; try again later, or capture less",
        )
