"""Imports of a process before it forks engines and servers; importing this module runs them."""

import gc
import importlib
import multiprocessing
import os
from typing import Any

import setproctitle

from support import once
from support.preloaded_vllm import check_threads

_MODULES = (
    "midstream.cli.app",
    "midstream.lab.api.async_llm",
    "midstream.lab.api.llm",
    "midstream.lab.server",
    "midstream.runtime.frontend.async_frontend",
    "midstream.runtime.frontend.sync_frontend",
    "midstream.runtime.worker.assembly",
    "midstream.server.app.endpoint_plugin",
    "midstream.sinks.store_sink",
)


def fork_in_place_of_spawning() -> None:
    """Have vLLM fork engine cores and workers, as it does on a GPU. On a CPU it spawns them, and a
    spawned process imports everything anew.
    """
    original = multiprocessing.get_context

    def get_context(method: str | None = None) -> Any:
        return original("fork" if method == "spawn" else method)

    multiprocessing.get_context = get_context


def log_anew() -> None:
    """Have vLLM's log follow the environment of now: it read the level when it was imported."""
    from vllm import logger

    logger._configure_vllm_root_logger()


for _name in _MODULES:
    importlib.import_module(_name)
# vLLM gives its processes titles, for which room is looked up while the environment is as it was.
setproctitle.setproctitle(setproctitle.getproctitle())
once.for_all_engines()
# A rank that waits for the next step looks for it all the time for a second, on a core that others
# could use, before it lets itself be woken.
shm_broadcast: Any = importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
shm_broadcast.SpinCondition.__init__.__defaults__ = (0.002,)
cpu_communicator: Any = importlib.import_module(
    "vllm.distributed.device_communicators.cpu_communicator"
)
# Ranks that put their parts together would look for the others' all the time too; Gloo sleeps.
cpu_communicator.CpuCommunicator._all_group_ranks_share_shm_group_name = lambda _self: False
gc.collect()
gc.freeze()
# It stays frozen in the children: vLLM collects garbage three times as an engine ends.
gc.unfreeze = lambda: None
if os.environ.get("MIDSTREAM_TEST_FORKS"):
    fork_in_place_of_spawning()
    check_threads()
