"""Which thread uses an engine that its caller steps: one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from midstream.errors import BusyError

_RETRY_SECONDS = 1


class EngineUse:
    """Lets one thread use an engine, from its call until its requests have ended: vLLM's offline
    engine returns what ends to the caller that runs its loop.
    """

    def __init__(self, has_unfinished: Callable[[], bool]) -> None:
        self._has_unfinished = has_unfinished
        self._lock = threading.Lock()  # never held while anything is waited for
        self._owner: threading.Thread | None = None
        self._depth = 0  # calls of the owner within one another

    def call(self) -> EngineUse:
        """Return the context in which this thread uses the engine: this."""
        return self

    def __enter__(self) -> None:
        with self._lock:
            self._take()
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1

    @contextmanager
    def whole_call(self) -> Iterator[None]:
        """As `call`, for a call that returns whatever the engine has until it is idle."""
        with self.call():
            if self._depth == 1 and self._has_unfinished():
                raise BusyError(
                    "requests that were queued before have not ended, and this call would return "
                    "their outputs as well; call wait_for_completion() first",
                    _RETRY_SECONDS,
                )
            yield

    def claim(self) -> None:
        """Check that this thread may use the engine, to which it is about to add a request."""
        with self._lock:
            self._take()

    def _take(self) -> None:
        me, owner = threading.current_thread(), self._owner
        if owner is not None and owner is not me:
            is_under_way = self._depth or (owner.is_alive() and self._has_unfinished())
            if is_under_way:
                raise BusyError(
                    f"this LLM is in use by the thread {owner.name!r}, and has one call at a time; "
                    "give it all prompts in one call, call it from one thread or behind a lock of "
                    "your own, or use AsyncLLM, which runs concurrent calls together",
                    _RETRY_SECONDS,
                )
        self._owner = me
