"""Requests that find no room wait for it, in front of the engine, in the order in which they came.

Requests that ask for nothing pass by.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from midstream.runtime.budget import Budget, Need

Send = Callable[[], object]


class Admission:
    """Keeper of the engine's door, by the uids of what is under way."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._admitted: dict[str, Need] = {}
        self._ended: dict[str, Need] = {}
        self._waiting: OrderedDict[str, tuple[Need, list[Send]]] = OrderedDict()

    def submit(self, uid: str, need: Need, send: Send) -> None:
        """Sends a request on its way, now or when there is room.

        Args:
            uid: names what is asked for; several requests (n > 1) may share it.
            need: what it takes.
            send: hands the request to the engine.
        """
        if uid in self._admitted or uid in self._ended:
            send()
        elif uid in self._waiting:
            self._waiting[uid][1].append(send)
        elif not self._waiting and self._budget.fits(need):
            self._admit(uid, need)
            send()
        else:
            self._waiting[uid] = (need, [send])

    def end(self, uids: list[str]) -> None:
        """These have ended, and their rows are to be fetched; those that waited for the room that
        is free now go on.
        """
        self._end(uids)
        self._let_in()

    def give_back_rows(self, uid: str, nbytes: int) -> None:
        """Rows of a request that goes on have been fetched; those that waited for their room go
        on.
        """
        need = self._admitted.get(uid)
        if need is not None:
            left = max(0, need.rows - nbytes)
            self._budget.give_back_rows(replace(need, rows=need.rows - left))
            self._admitted[uid] = replace(need, rows=left)
            self._let_in()

    def finish(self, uids: list[str]) -> None:
        """These have ended and their rows were fetched, or they were given up; those that waited
        for their room go on.
        """
        self._end(uids)
        for uid in uids:
            need = self._ended.pop(uid, None)
            if need is not None:
                self._budget.give_back_rows(need)
            self._waiting.pop(uid, None)
        self._let_in()

    def _end(self, uids: list[str]) -> None:
        for uid in uids:
            need = self._admitted.pop(uid, None)
            if need is not None:
                self._budget.give_back(need)
                self._ended[uid] = need

    def is_waiting(self, uid: str) -> bool:
        """Whether it has been submitted and not been sent yet."""
        return uid in self._waiting

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def _let_in(self) -> None:
        while self._waiting:
            uid, (need, sends) = next(iter(self._waiting.items()))
            # With nobody inside it fits: what never could was refused when it came.
            if not self._budget.fits(need):
                break
            del self._waiting[uid]
            self._admit(uid, need)
            try:
                for send in sends:
                    send()
            except BaseException:
                # It goes no further, and those behind it must not wait for its room.
                need = self._admitted.pop(uid)
                self._budget.give_back(need)
                self._budget.give_back_rows(need)
                self._let_in()
                raise

    def _admit(self, uid: str, need: Need) -> None:
        self._budget.take(need)
        self._admitted[uid] = need
