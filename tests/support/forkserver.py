"""Engine cores and workers of an engine in the tests' own process, forked instead of spawned."""

import functools
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import pytest
import torch

from support import zygote


class _Process(ForkServerProcess):
    """A process with the environment of the process that starts it, not of the server."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._environ = dict(os.environ)

    def run(self) -> None:
        from support import preloaded

        os.environ.clear()
        os.environ.update(self._environ)
        preloaded.log_anew()
        super().run()


class _Context(ForkServerContext):
    Process = _Process


@contextmanager
def in_place_of_spawning() -> Iterator[None]:
    """vLLM's own processes are forked in the block; on a GPU they are what vLLM makes them."""
    if torch.cuda.is_available():
        yield
        return
    original = multiprocessing.get_context
    _run_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            multiprocessing,
            "get_context",
            lambda method=None: _Context() if method == "spawn" else original(method),
        )
        yield


@functools.cache
def _run_server() -> None:
    """Run the server from which processes are forked, itself forked from the zygote."""

    def fork(path: str, arguments: list[Any], kept: Sequence[int]) -> int:
        return zygote.start(arguments[-2:], env=environment, kept=kept).pid

    environment = {
        **os.environ, **zygote.SERVER_ENVIRONMENT, "PYTHONPATH": zygote.python_path(),
    }  # fmt: skip
    multiprocessing.set_forkserver_preload([])  # the zygote has imported all
    resource_tracker.ensure_running()  # a process of its own, started in the usual way
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", fork)
        forkserver.ensure_running()
    # It looks for a child of this process, and starts another one if that has ended.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
