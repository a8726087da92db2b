"""What servers leave when they have ended: nothing."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from support.serving import Running
from support.shared_memory import mapped


@contextmanager
def nothing_left() -> Iterator[Callable[[Running], None]]:
    """Whatever becomes of the servers that are noted in the block, it all goes with them."""
    names = set(os.listdir("/dev/shm"))
    processes: list[psutil.Process] = []
    memory: set[tuple[str, str, str]] = set()

    def note(server: Running) -> None:
        processes.extend(server.tree)
        memory.update(mapped(one.pid for one in server.tree))

    yield note
    assert processes
    assert memory, "the server had no shared memory"
    end = time.monotonic() + 60
    while left := [one for one in processes if one.is_running() and one.status() != "zombie"]:
        assert time.monotonic() < end, f"processes are left: {left}"
        time.sleep(0.05)
    while kept := memory & mapped():
        assert time.monotonic() < end, f"shared memory is left: {kept}"
        time.sleep(0.05)
    assert not [name for name in set(os.listdir("/dev/shm")) - names if "midstream" in name]
