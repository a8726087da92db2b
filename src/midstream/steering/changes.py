"""Where changes of named vectors and of server-wide edits hold: in this process, or in several."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext


class Changes:
    """What a registry and tiers call around each use: here, changes hold in this process alone."""

    def refresh(self) -> None:
        """Take over what other processes have changed. Called before each read."""

    def changing(self) -> AbstractContextManager[None]:
        """Return the context of a change: no other process changes anything meanwhile, and its
        result holds in all processes when it ends. After an exception it holds in none.
        """
        return nullcontext()
