"""Engine cores and workers of an engine in the tests' own process, forked instead of spawned."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import pytest
import torch

from support.zygote import python_path


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
    with pytest.MonkeyPatch.context() as patch:
        from support.zygote import SERVER_ENVIRONMENT

        for name, value in {**SERVER_ENVIRONMENT, "PYTHONPATH": python_path()}.items():
            patch.setenv(name, value)
        multiprocessing.set_forkserver_preload(["support.preloaded"])
        forkserver.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            multiprocessing,
            "get_context",
            lambda method=None: _Context() if method == "spawn" else original(method),
        )
        yield
