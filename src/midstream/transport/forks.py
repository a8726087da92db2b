"""Forked children that may read mapped memory: a pipe's only writing end shows that one lives."""

from __future__ import annotations

import os
import select
import threading
from contextlib import suppress
from dataclasses import dataclass

NO_FORK = -1
_PENDING = 1 << 62


@dataclass(eq=False, slots=True)
class _Child:
    number: int  # how many forks there were before it
    reading: int


class Forks:
    """Forks of this process during which it had a claim on memory of another process."""

    def __init__(self) -> None:
        self._count = 0
        self._claims: set[object] = set()
        self._children: list[_Child] = []
        self._forking = threading.local()  # threads may fork at the same time

    def claim(self, holder: object) -> int:
        """Add a claim; return its time, which is the number of forks so far."""
        self._claims.add(holder)
        return self._count

    def drop(self, holder: object) -> None:
        """Remove a claim. Children may still read its memory: see `newest`."""
        self._claims.discard(holder)

    def newest(self) -> int:
        """Return the last fork whose child, with all claims until then, lives; or `NO_FORK`."""
        if not self._children:
            return NO_FORK
        watched = select.poll()
        children = list(self._children)
        for child in children:
            watched.register(child.reading, 0)
        ended = {reading for reading, _ in watched.poll(0)}
        for child in children:
            if child.reading in ended:
                with suppress(ValueError):  # another thread was faster
                    self._children.remove(child)
                    os.close(child.reading)
        return max((child.number for child in self._children), default=NO_FORK)

    def before(self) -> None:
        self._forking.now = None
        if self._claims:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            # Until the fork is complete, the child counts as forked after every claim.
            child = _Child(_PENDING, reading)
            self._children.append(child)
            self._forking.now = child, writing

    def after_in_parent(self) -> None:
        """Close the parent's writing end; a fork that failed has no child then."""
        if self._forking.now is not None:
            child, writing = self._forking.now
            child.number = self._count
            self._count += 1
            os.close(writing)

    def after_in_child(self) -> None:
        """Keep the writing end, and nothing else of the parent's."""
        for child in self._children:
            os.close(child.reading)
        self._children.clear()
        self._claims.clear()


FORKS = Forks()
os.register_at_fork(
    before=FORKS.before,
    after_in_parent=FORKS.after_in_parent,
    after_in_child=FORKS.after_in_child,
)
