"""Admission of requests with a plan: each waits, in order, until an engine has capacity."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from midstream.errors import BusyError
from midstream.runtime.frontend.request.budget import CapacityBudget, Need

Send = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A request that was sent to an engine. `more`: what later versions of its plan take."""

    need: Need
    replica: int
    more: tuple[Need, ...] = ()


@dataclass(frozen=True, slots=True)
class _Waiting:
    need: Need
    allowed: frozenset[int]  # numbers of the engines that it may go to
    sends: list[Send] = field(default_factory=list)  # send its vLLM requests, in order


class Admission:
    """Admits requests to engines, by their uids."""

    def __init__(
        self, budgets: Sequence[CapacityBudget], busy: Callable[[], Sequence[int]] | None = None
    ) -> None:
        """Create it. `busy` returns the requests on each engine; None: not known, or one engine."""
        self._budgets = budgets
        self._busy = busy
        self._every = frozenset(range(len(budgets)))
        self._counts = [0] * len(budgets)
        self._admitted: dict[str, _Admitted] = {}
        self._ended: dict[str, _Admitted] = {}
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()

    def submit(self, uid: str, need: Need, send: Send, only: int | None = None) -> None:
        """Send a request when there is capacity; all of a uid go to one engine, or to `only`."""
        if uid in self._admitted or uid in self._ended:
            send()
            return
        if uid in self._waiting:
            self._waiting[uid].sends.append(send)
            return
        allowed = self._every if only is None else frozenset({only})
        replica = self._find(need, allowed - self._waited_for() if self._waiting else allowed)
        if replica is None:
            self._waiting[uid] = _Waiting(need, allowed, [send])
        else:
            self._admit(uid, need, replica)
            send()

    def replica_of(self, uid: str) -> int:
        admitted = self._admitted.get(uid) or self._ended[uid]
        return admitted.replica

    def extend(self, needs: Mapping[str, Need]) -> None:
        """Take more capacity for later plans of running requests, without rows, or raise."""
        taken: list[tuple[CapacityBudget, Need]] = []
        for uid, need in needs.items():
            budget = self._budgets[self._admitted[uid].replica]
            if not budget.fits(need):
                for earlier, taken_need in taken:
                    earlier.release_tables(taken_need)
                raise BusyError(
                    "there is no capacity now for another version of the request's plan, which "
                    "takes room until the request ends: use edits that requests have already, "
                    "update less often, or raise midstream's settings programs, max_edits and "
                    "bank_rows",
                    1,
                )
            budget.take(need)
            taken.append((budget, need))
        for uid, need in needs.items():
            admitted = self._admitted[uid]
            self._admitted[uid] = replace(admitted, more=(*admitted.more, need))

    def end(self, uids: list[str]) -> None:
        """Release the capacity of ended requests, except for their rows."""
        self._end(uids)
        self._admit_waiting()

    def release_rows(self, uid: str, nbytes: int) -> None:
        """Release the capacity for rows of a running request that were fetched."""
        admitted = self._admitted.get(uid)
        if admitted is not None:
            need = admitted.need
            left = max(0, need.rows - nbytes)
            self._budgets[admitted.replica].release_rows(need.with_rows(need.rows - left))
            self._admitted[uid] = replace(admitted, need=need.with_rows(left))
            self._admit_waiting()

    def finish(self, uids: list[str]) -> None:
        """Release all capacity of requests whose rows were fetched, or are not needed."""
        self._end(uids)
        for uid in uids:
            ended = self._ended.pop(uid, None)
            if ended is not None:
                self._budgets[ended.replica].release_rows(ended.need)
            self._waiting.pop(uid, None)
        self._admit_waiting()

    def _end(self, uids: list[str]) -> None:
        for uid in uids:
            admitted = self._admitted.pop(uid, None)
            if admitted is not None:
                self._counts[admitted.replica] -= 1
                for need in (admitted.need, *admitted.more):
                    self._budgets[admitted.replica].release_tables(need)
                self._ended[uid] = admitted

    def is_running(self, uid: str) -> bool:
        """Return whether a request was sent and has not ended."""
        return uid in self._admitted

    def is_waiting(self, uid: str) -> bool:
        """Return whether a request was submitted and not sent yet."""
        return uid in self._waiting

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _admit_waiting(self) -> None:
        """Send the waiting requests for which there is capacity now."""
        if not self._waiting:
            return
        while (next_request := self._next()) is not None:
            uid, replica = next_request
            waiting = self._waiting.pop(uid)
            self._admit(uid, waiting.need, replica)
            try:
                for send in waiting.sends:
                    send()
            except BaseException:
                # The requests behind it must not wait for its capacity.
                self._end([uid])
                one_ended = self._ended.pop(uid)
                self._budgets[replica].release_rows(one_ended.need)
                self._admit_waiting()
                raise

    def _waited_for(self) -> frozenset[int]:
        replicas: frozenset[int] = frozenset()
        for waiting in self._waiting.values():
            replicas |= waiting.allowed
            if replicas == self._every:  # usually with the first request
                break
        return replicas

    def _next(self) -> tuple[str, int] | None:
        """Return the first waiting request that fits, and its engine; earlier ones go first."""
        waited_for: frozenset[int] = frozenset()
        for uid, waiting in self._waiting.items():
            # It fits an idle engine: `check_rows` and `need_of` rejected those that never would.
            replica = self._find(waiting.need, waiting.allowed - waited_for)
            if replica is not None:
                return uid, replica
            waited_for |= waiting.allowed
            if waited_for == self._every:
                break
        return None

    def _find(self, need: Need, allowed: frozenset[int]) -> int | None:
        """Return the least busy of these engines that has capacity; None: none has."""
        if len(self._budgets) == 1:
            return 0 if allowed and self._budgets[0].fits(need) else None
        fitting = [number for number in allowed if self._budgets[number].fits(need)]
        if not fitting:
            return None
        busy = self._counts if self._busy is None else self._busy()
        # Reports of the engines are late, and the counts here lack requests without a plan.
        return min(
            fitting,
            key=lambda replica: (
                max(busy[replica], self._counts[replica]),
                self._counts[replica],
                replica,
            ),
        )

    def _admit(self, uid: str, need: Need, replica: int) -> None:
        self._budgets[replica].take(need)
        self._counts[replica] += 1
        self._admitted[uid] = _Admitted(need, replica)
