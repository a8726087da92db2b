"""End of a process whose parent has ended, of which vLLM's engine gets no message."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time

# vLLM's names of these processes begin so.
_NAMES = ("EngineCore", "ApiServer")
_PATIENCE = 10  # seconds


@functools.cache
def end_with_parent() -> None:
    """End this process when its parent process has ended, if this is one of these processes."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_NAMES):
        return
    threading.Thread(
        target=_watch, args=(parent.sentinel,), name="midstream orphan", daemon=True
    ).start()


def _watch(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    # SIGTERM ends an engine in vLLM's own way; SIGKILL if that does not happen.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)
