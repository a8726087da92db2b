"""Which sums of reduced rows the workers keep at the ends of cached blocks, and for how long."""

from __future__ import annotations

from collections import OrderedDict

# Host memory of a worker for kept sums; those that one step adds may be more.
MOST_BYTES = 256 << 20


class SumBudget:
    """Kept sums by key and id of their block, the last used at the end. Those that no request gets
    any more, as the block has other content or room was short, stay until the workers drop them.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._sizes: OrderedDict[tuple[str, int], int] = OrderedDict()  # bytes
        self._gone: dict[tuple[str, int], int] = {}  # bytes of those that no request gets
        self._live = self._dead = 0  # bytes of both

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def nbytes(self) -> int:
        """Bytes that the workers have at most."""
        return self._live + self._dead

    def use(self, key: str, block: int, nbytes: int) -> None:
        """Note sums that a request makes or gets."""
        kept = key, block
        self._dead -= self._gone.pop(kept, 0)
        if kept not in self._sizes:
            self._sizes[kept] = nbytes
            self._live += nbytes
        self._sizes.move_to_end(kept)

    def forget(self, key: str, block: int) -> None:
        """Note sums that no request gets from now on."""
        kept = key, block
        nbytes = self._sizes.pop(kept, None)
        if nbytes is not None:
            self._gone[kept] = nbytes
            self._live -= nbytes
            self._dead += nbytes

    def forget_key(self, key: str) -> None:
        for kept in [kept for kept in self._sizes if kept[0] == key]:
            self.forget(*kept)

    def evict(self) -> list[tuple[str, int]]:
        """Forget the sums that were used longest ago where there are too many; return them."""
        evicted = []
        while self._live > self._most:
            kept = next(iter(self._sizes))
            self.forget(*kept)
            evicted.append(kept)
        return evicted

    def take_dropped(self) -> dict[str, list[int]]:
        """Return, once, the blocks by key whose sums workers must drop now; empty: none."""
        if self.nbytes <= self._most:
            return {}
        dropped: dict[str, list[int]] = {}
        for key, block in self._gone:
            dropped.setdefault(key, []).append(block)
        self._gone.clear()
        self._dead = 0
        return dropped
