"""A few threads for parsing and resolving large plans, which would hold an event loop."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

# Threads of a process, for all of its engines and clients.
THREADS = 2

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Return the result of work that one of the threads does, after earlier work."""
    run = functools.partial(work, *args, **named)
    return await asyncio.get_running_loop().run_in_executor(_threads(os.getpid()), run)


@functools.lru_cache(maxsize=1)
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the threads of a process: a fork has none of its parent's."""
    return ThreadPoolExecutor(THREADS, thread_name_prefix="midstream-plan")
