"""Budget of file descriptors for cached rows, a part of what the process may have open."""

from __future__ import annotations

import resource
from collections import Counter

from midstream.errors import HttpError

# Cached rows that are fetched take one; whoever reads them takes another, and a file of its own.
ENTRY, READER = 1, 2
_SHARE = 2  # of the process's files, one of so many are for cached rows; of these, for one client
_UNLIMITED = 1 << 20


class DescriptorBudget:
    """Descriptors that cached rows may take, so that clients can connect. Not thread-safe."""

    def __init__(self) -> None:
        self._of_client: Counter[str] = Counter()
        self._all = 0

    @property
    def used(self) -> int:
        """Number of the counted descriptors."""
        return self._all

    def check(self, client: str, count: int) -> None:
        """Check that a client may take more descriptors."""
        files = _files()
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
        if self._all + count > most:
            raise HttpError(
                507,
                f"the captures that this server caches take {self._all} file descriptors, and "
                f"{count} more exceed the limit of {most}, a part of the {files} files that it may "
                "have open; try again later, or raise the server's limit (ulimit -n)",
            )

    def add(self, client: str, count: int) -> None:
        """Count descriptors that a client takes, or with a negative number gives back."""
        self._of_client[client] += count
        self._all += count
        if not self._of_client[client]:
            del self._of_client[client]


def _files() -> int:
    """Return how many files this process may have open; it may change while it runs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _UNLIMITED if limit == resource.RLIM_INFINITY else limit
