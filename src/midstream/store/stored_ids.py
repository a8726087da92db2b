"""Ids of the requests in a store, so that none is given to another request."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.store.backends.base import Folder
from midstream.store.format.shard import Shard

# Ids of new shards are searched one by one until there are so many, then sorted with the others.
_UNSORTED = 1 << 16


class StoredIds:
    """The ids in a store, of which shards are read once; 16 bytes per request. Thread-safe."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._of_shard: dict[str, NDArray[np.uint64]] = {}
        self._sorted: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._recent: set[int] = set()
        self._lock = threading.Lock()

    def add(self, shard: str, requests: Iterable[str]) -> None:
        with self._lock:
            self._add(shard, requests)

    def has(self, request: str) -> bool:
        """Return whether a request of this id is stored. Reads shards that are not known yet."""
        key = _key(request)
        with self._lock:
            self._refresh()
            if key in self._recent:
                return True
            place = int(np.searchsorted(self._sorted, np.uint64(key)))
            return place < len(self._sorted) and int(self._sorted[place]) == key

    def _refresh(self) -> None:
        names = self._folder.names()
        for name in names:
            if name in self._of_shard:
                continue
            try:
                lines = Shard(self._folder, name).lines
            except StoreError:
                if name in self._folder.names():
                    raise
                # It was merged or pruned after the names were read.
                self._refresh()
                return
            self._add(name, (line.request for line in lines))
        gone = self._of_shard.keys() - set(names)
        for name in gone:
            del self._of_shard[name]
        if gone or len(self._recent) > max(_UNSORTED, len(self._sorted) // 8):
            every = [np.empty(0, np.uint64), *self._of_shard.values()]
            self._sorted, self._recent = np.sort(np.concatenate(every)), set()

    def _add(self, shard: str, requests: Iterable[str]) -> None:
        keys = {_key(request) for request in requests}
        self._of_shard[shard] = np.array(sorted(keys), np.uint64)
        self._recent |= keys


def _key(request: str) -> int:
    """Return 64 bits of an id's digest: of a million ids no two have the same but by 1 in 10⁷."""
    return int.from_bytes(hashlib.blake2b(request.encode(), digest_size=8).digest(), "little")
