"""A process that writes a store until it is killed, and what must be true of the store then."""

import contextlib
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

from unit.store.making import TAPS, entry, header, same, vectors

from midstream import open_store
from midstream.errors import StoreError
from midstream.store import Writer, merge, verify

CALLS = ("open", "writev", "fsync", "rename", "close")
_CONTEXT = multiprocessing.get_context("fork")


def made(number: int):
    """Completion `number`: 0 to 4 rows at three taps."""
    return entry(f"r{number}", rows=number % 5, seed=10 * number, metadata={"n": number})


def write_on(root: Path, told, *, die_at: int | None = None, last: int = 1 << 30) -> None:
    """Goes on from where the store ends, and tells what is acknowledged, as [first, stop)."""
    there = {each.request for each in open_store(root).requests} if root.exists() else set()
    if die_at is not None:
        _die(die_at)
    chance = random.Random(len(there))
    number = 0
    with Writer(root, header(), shard_bytes=6000) as writer:
        while number < last:
            first, stop = number, min(number + chance.randint(1, 9), last)
            while number < stop:
                if f"r{number}" not in there:
                    writer.add(made(number))
                number += 1
            writer.flush()
            told.send((first, number))


def _die(at: int) -> None:
    calls = 0

    def counted(real):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls > at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))


def merge_on(root: Path) -> None:
    """Merges over and over."""
    while True:
        with contextlib.suppress(StoreError):  # another one is at it
            merge(root, root, shard_bytes=20_000)


class Killed:
    """A store written by processes that are killed; completions [0, `acknowledged`) are in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.acknowledged = 0

    def run(self, after_s: float = 0.0, merging: bool = False, **options) -> bool:
        """Starts a writer, and kills it some time after its first word, unless it kills itself."""
        hear, tell = _CONTEXT.Pipe(duplex=False)
        writer = _CONTEXT.Process(target=write_on, args=(self.root, tell), kwargs=options)
        writer.start()
        tell.close()
        merger = _CONTEXT.Process(target=merge_on, args=(self.root,))
        self._listen(hear, 1)
        if merging:
            merger.start()
        if not options:
            time.sleep(after_s)
            os.kill(writer.pid, signal.SIGKILL)
        self._listen(hear)
        if merging:
            os.kill(merger.pid, signal.SIGKILL)
            merger.join()
        writer.join()
        return writer.exitcode == -signal.SIGKILL

    def _listen(self, hear, most: int = 1 << 30) -> None:
        with contextlib.suppress(EOFError):
            for _ in range(most):
                first, stop = hear.recv()
                assert first <= self.acknowledged
                self.acknowledged = max(self.acknowledged, stop)

    def check(self) -> None:
        """What must be true whenever the processes ended."""
        if not self.root.exists():
            assert not self.acknowledged
            return
        found = verify(self.root)
        assert found.ok, str(found)
        store = open_store(self.root)
        ids = [each.request for each in store.requests]
        assert len(ids) == len(set(ids)), "no row is there twice"
        assert set(ids) >= {f"r{n}" for n in range(self.acknowledged)}, "what was acknowledged"
        head = header()
        for each in store.requests[-20:]:
            number = each.metadata["n"]
            activations = each.activations()
            for i, tap in enumerate(TAPS):
                assert same(activations[tap], vectors(10 * number + i, number % 5, head))
