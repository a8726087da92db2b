"""Rows that requests leave on the device: how many there are, who uses them, and until when."""

from __future__ import annotations

import threading
from collections import Counter, deque

from midstream.errors import BusyError, SpecError
from midstream.plan import ResolvedPlan
from midstream.plan.vectors.device_row import DeviceSource
from midstream.runtime.frontend.request.budget import Need, left_taps

_RETRY_SECONDS = 1
_SHARE = 2  # of the room, one of so many is for one client of a server


class DeviceSources:
    """The requests that left rows on the device, until these are freed. A source is kept alive by
    the results of its request alone, so that one without results frees its rows too. Thread-safe.
    """

    def __init__(self, most: int, width: int) -> None:
        self._most, self._width = most, width
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}  # rows, by id, also of those that wait for their users
        self._clients: dict[str, str] = {}  # of a server, by id
        self._users: Counter[str] = Counter()  # running requests, by the id of the source
        self._sources_of: dict[str, tuple[str, ...]] = {}  # by uid of the running request
        # Written by finalizers, which may run in any thread while it has the lock.
        self._dropped: deque[str] = deque()
        self._unused: list[str] = []  # dropped, and not freed yet as they have users
        self._freed: list[str] = []  # to be freed by the workers, before later rows

    def __len__(self) -> int:
        with self._lock:
            self._settle()
            return len(self._sizes)

    def begin(
        self, uid: str, need: Need, plan: ResolvedPlan, client: str = ""
    ) -> DeviceSource | None:
        """Count the rows that a request leaves, and let it use those of its edits until `end`.
        A `client` of a server, empty: there is none, has a part of the room.

        Raises:
            SpecError: they exceed the room, or rows of its edits were freed. BusyError: they exceed
                the room that other requests leave, whose results are in use.
        """
        if not need.device_rows and not need.sources:
            return None
        with self._lock:
            self._settle()
            for source in need.sources:
                if source not in self._sizes or source in self._unused:
                    raise SpecError(
                        "edits",
                        f"the rows of request {source} are not on the device any more: its results "
                        "were dropped, or it was of another engine; capture them again",
                    )
            asked, used = f"{need.device_rows} rows are to stay", sum(self._sizes.values())
            most = self._most // _SHARE if client else self._most
            if need.device_rows > most:
                whose = " of each client" if client else ""
                raise SpecError(
                    "capture",
                    f"{asked} on the device, and there is room for {most}{whose}; choose fewer "
                    "positions or layers, or raise midstream's setting device_rows",
                )
            mine = sum(self._sizes[name] for name, of in self._clients.items() if of == client)
            if need.device_rows and mine + need.device_rows > most:
                raise BusyError(
                    f"{asked} on the device, and {mine} of the {most} of this client are there: "
                    "delete captures of earlier requests",
                    _RETRY_SECONDS,
                )
            if used + need.device_rows > self._most:
                raise BusyError(
                    f"{asked} on the device, and {used} of {self._most} are there: drop results of "
                    "earlier requests, or raise midstream's setting device_rows",
                    _RETRY_SECONDS,
                )
            self._users.update(need.sources)
            self._sources_of[uid] = need.sources
            if not need.device_rows:
                return None
            self._sizes[uid] = need.device_rows
            if client:
                self._clients[uid] = client
        return DeviceSource(uid, self._width, left_taps(plan), self._dropped.append)

    def end(self, uid: str) -> None:
        """Let an ended request use no rows any more. Later calls do nothing."""
        if uid in self._sources_of:
            with self._lock:
                self._users.subtract(self._sources_of.pop(uid, ()))

    def take_freed(self) -> tuple[str, ...]:
        """Return, once, the requests whose rows the workers are to free."""
        with self._lock:
            self._settle()
            freed, self._freed = tuple(self._freed), []
            return freed

    def lose(self, freed: tuple[str, ...]) -> None:
        """Record that the workers were not told."""
        with self._lock:
            self._freed += freed

    def _settle(self) -> None:
        """Free the rows of dropped sources without users."""
        while self._dropped:
            self._unused.append(self._dropped.popleft())
        for source in [source for source in self._unused if self._users[source] <= 0]:
            self._unused.remove(source)
            del self._sizes[source], self._users[source]
            self._clients.pop(source, None)
            self._freed.append(source)
