"""Requests that find no room wait for it, in front of the engine, in the order in which they came.

Requests that ask for nothing pass by. With data parallelism there are several engines, each with
tables of its own: a request goes to the least busy of those that have room for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from midstream.runtime.frontend.request.budget import Budget, Need

Send = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Inside:
    """Somebody who was let in.

    Attributes:
        need: what it takes.
        replica: which engine it is on.
    """

    need: Need
    replica: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Somebody who waits.

    Attributes:
        need: what it takes.
        allowed: the engines that it may go to.
        sends: each hands one of its requests to the engine.
    """

    need: Need
    allowed: frozenset[int]
    sends: list[Send] = field(default_factory=list)


class Admission:
    """Keeper of the engines' doors, by the uids of what is under way."""

    def __init__(
        self, budgets: Sequence[Budget], busy: Callable[[], Sequence[int]] | None = None
    ) -> None:
        """Args:
        budgets: one for each engine.
        busy: how many requests each engine has, those that ask for nothing included, as far as is
            known. None: that is not known, or there is but one engine.
        """
        self._budgets = budgets
        self._busy = busy
        self._every = frozenset(range(len(budgets)))
        self._counts = [0] * len(budgets)
        self._admitted: dict[str, _Inside] = {}
        self._ended: dict[str, _Inside] = {}
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()

    def submit(self, uid: str, need: Need, send: Send, only: int | None = None) -> None:
        """Sends a request on its way, now or when there is room.

        Args:
            uid: names what is asked for; several requests (n > 1) may share it, and go to one
                engine.
            need: what it takes.
            send: hands the request to the engine.
            only: the engine that it is to go to; None: any.
        """
        if uid in self._admitted or uid in self._ended:
            send()
            return
        if uid in self._waiting:
            self._waiting[uid].sends.append(send)
            return
        allowed = self._every if only is None else frozenset({only})
        found = self._find(need, allowed - self._waited_for())
        if found is None:
            self._waiting[uid] = _Waiting(need, allowed, [send])
        else:
            self._admit(uid, need, found)
            send()

    def replica_of(self, uid: str) -> int:
        """The engine of somebody who was let in and is still to be fetched."""
        inside = self._admitted.get(uid) or self._ended[uid]
        return inside.replica

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
        inside = self._admitted.get(uid)
        if inside is not None:
            need = inside.need
            left = max(0, need.rows - nbytes)
            self._budgets[inside.replica].give_back_rows(replace(need, rows=need.rows - left))
            self._admitted[uid] = replace(inside, need=replace(need, rows=left))
            self._let_in()

    def finish(self, uids: list[str]) -> None:
        """These have ended and their rows were fetched, or they were given up; those that waited
        for their room go on.
        """
        self._end(uids)
        for uid in uids:
            inside = self._ended.pop(uid, None)
            if inside is not None:
                self._budgets[inside.replica].give_back_rows(inside.need)
            self._waiting.pop(uid, None)
        self._let_in()

    def _end(self, uids: list[str]) -> None:
        for uid in uids:
            inside = self._admitted.pop(uid, None)
            if inside is not None:
                self._counts[inside.replica] -= 1
                self._budgets[inside.replica].give_back(inside.need)
                self._ended[uid] = inside

    def is_waiting(self, uid: str) -> bool:
        """Whether it has been submitted and not been sent yet."""
        return uid in self._waiting

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def _let_in(self) -> None:
        while (found := self._next()) is not None:
            uid, replica = found
            one = self._waiting.pop(uid)
            self._admit(uid, one.need, replica)
            try:
                for send in one.sends:
                    send()
            except BaseException:
                # It goes no further, and those behind it must not wait for its room.
                self._end([uid])
                inside = self._ended.pop(uid)
                self._budgets[replica].give_back_rows(inside.need)
                self._let_in()
                raise

    def _waited_for(self) -> frozenset[int]:
        """The engines that somebody waits for."""
        found: frozenset[int] = frozenset()
        for one in self._waiting.values():
            found |= one.allowed
            if found == self._every:  # as a rule with the first of them
                break
        return found

    def _next(self) -> tuple[str, int] | None:
        """The first that may go, and to which engine: to none that somebody before it waits for."""
        waited_for: frozenset[int] = frozenset()
        for uid, one in self._waiting.items():
            # With nobody inside it fits: what never could was refused when it came.
            found = self._find(one.need, one.allowed - waited_for)
            if found is not None:
                return uid, found
            waited_for |= one.allowed
            if waited_for == self._every:
                break
        return None

    def _find(self, need: Need, allowed: frozenset[int]) -> int | None:
        """The least busy of some engines that have room; None where none has."""
        having_room = [number for number in allowed if self._budgets[number].fits(need)]
        if not having_room:
            return None
        if len(self._budgets) == 1:
            return having_room[0]
        busy = self._counts if self._busy is None else self._busy()
        # What the engines tell lags behind, and what is counted here knows nothing of the others.
        return min(
            having_room,
            key=lambda nth: (max(busy[nth], self._counts[nth]), self._counts[nth], nth),
        )

    def _admit(self, uid: str, need: Need, replica: int) -> None:
        self._budgets[replica].take(need)
        self._counts[replica] += 1
        self._admitted[uid] = _Inside(need, replica)
