"""An engine whose front end is gone ends, and gives back its memory, however that came.

vLLM's engine process ends when it is told to. A front end that is killed tells nobody, and the
engine, its workers and the rows that they hold would stay.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time

# How vLLM calls the process.
_NAME = "EngineCore"
_PATIENCE = 10  # seconds


@functools.cache
def end_with_parent() -> None:
    """From now on this process ends when the one that started it has, if it is an engine's own."""
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_NAME):
        return
    threading.Thread(
        target=_watch, args=(parent.sentinel,), name="midstream orphan", daemon=True
    ).start()


def _watch(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    # vLLM's own way to end an engine, and a surer one should it not come to that.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)
