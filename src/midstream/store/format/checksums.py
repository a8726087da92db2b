"""Shard checksums, against damage: CRC-32 of each block, by threads, as zlib releases the GIL."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.store.format.layout import BLOCK

JOB = 64 * BLOCK  # bytes per unit of work
_THREADS = min(4, os.cpu_count() or 1)
_MAX_PENDING = 4 * _THREADS  # jobs; their rows stay in memory until they finish


def block_sums(pieces: Iterable[memoryview]) -> list[int]:
    """Return the checksum of each block of consecutive bytes; the last may be shorter."""
    sums = []
    total = filled = 0
    for piece in pieces:
        taken = 0
        while taken < len(piece):
            part = piece[taken : taken + BLOCK - filled]
            total = zlib.crc32(part, total)
            taken += len(part)
            filled += len(part)
            if filled == BLOCK:
                sums.append(total)
                total = filled = 0
    if filled:
        sums.append(total)
    return sums


def seal(sums: Iterable[int]) -> NDArray[np.uint32]:
    """Return checksums followed by the checksum of the list itself, uint32."""
    words = np.fromiter(sums, np.uint32)
    return np.append(words, np.uint32(zlib.crc32(words.tobytes())))


class Summing:
    """Computes the checksums of a shard's data while it is written."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._job: list[memoryview] = []
        self._remaining = JOB
        self._pool: ThreadPoolExecutor | None = None
        self._running: deque[Future[list[int]]] = deque()

    def add(self, piece: memoryview) -> None:
        """Add the next bytes, which must not change until `finish`."""
        taken = 0
        while taken < len(piece):
            part = piece[taken : taken + self._remaining]
            self._job.append(part)
            taken += len(part)
            self._remaining -= len(part)
            if not self._remaining:
                self._start()

    def finish(self) -> list[int]:
        while self._running:
            self._sums.extend(self._running.popleft().result())
        return self._sums + block_sums(self._job)

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def _start(self) -> None:
        # Created with the first full job: for small shards, threads cost more than they save.
        self._pool = self._pool or ThreadPoolExecutor(_THREADS)
        self._running.append(self._pool.submit(block_sums, self._job))
        self._job, self._remaining = [], JOB
        if len(self._running) > _MAX_PENDING:
            self._sums.extend(self._running.popleft().result())


def in_parallel(work: Callable[[int, int], Any], start: int, stop: int) -> Iterator[Any]:
    """Yield work(a, b) in order for ranges of up to `JOB` that cover [start, stop), by threads."""
    starts = range(start, stop, JOB)
    stops = (min(first + JOB, stop) for first in starts)
    if len(starts) <= 1:
        yield from map(work, starts, stops)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from pool.map(work, starts, stops)


def each_of(ranges: list[tuple[int, int]], work: Callable[[int, int], Any], nbytes: int) -> None:
    """Call work(a, b) for each range; by threads, if all are of more than `JOB` bytes."""
    if len(ranges) <= 1 or nbytes <= JOB:
        for first, last in ranges:
            work(first, last)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        # The results are read so that errors are raised.
        for _ in pool.map(lambda limits: work(*limits), ranges):
            pass
