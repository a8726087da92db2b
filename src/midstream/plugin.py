"""The `vllm.general_plugins` entry point. vLLM calls `register` once per process without naming the
engine, and engines that do not enable midstream must not change. So it reads `sys.argv` with its
file of options, and local variables of its callers, which have the engine's settings. If the first
engine of a process does not enable midstream, the workers reject a later one that does in
`additional_config`, unless `midstream.activate()` was called or a `midstream.LLM` made.
"""

from __future__ import annotations

import inspect
import os
import sys
from typing import Any

from midstream import runtime

_KEY = "midstream"
_WORKER = "midstream.worker.CaptureWorker"
# Frames that are read: the first callers of `register`, and the two beneath them.
_DEPTH = 14


def register() -> None:
    """Install midstream's hooks in this process if the engine that is starting enables it."""
    # No imports: this also runs in every process of engines that do not use midstream.
    by_environment = os.environ.get("MIDSTREAM", "").strip() not in ("", "0")
    if by_environment or _command_line_enables() or _caller_enables():
        from midstream.runtime.install import activate

        activate()


def install_server() -> None:
    """Install the hooks of the server: a process with an `AsyncLLM` may build its app."""
    from midstream.server.app.install import install

    install()


# This module is imported with the package, so engines of all kinds have them.
runtime.INSTALLERS.append(install_server)


def _command_line_enables() -> bool:
    """Return whether `sys.argv` enables midstream, in an option or in `--config`'s file."""
    for word, following in zip(sys.argv, [*sys.argv[1:], ""], strict=True):
        name, _, value = word.partition("=")
        option, value = name.replace("_", "-"), value or following
        if option == "--additional-config" and f'"{_KEY}"' in value:
            return True
        if option.split(".")[:2] == ["--additional-config", _KEY]:
            return True
        if option == "--worker-cls" and value == _WORKER:
            return True
        if option == "--config" and _file_enables(value):
            return True
    return False


def _file_enables(path: str) -> bool:
    """Return whether a YAML file of vLLM's options names midstream in those that can enable it."""
    try:
        if not os.path.isfile(path):
            return False  # vLLM alone may read a pipe
        with open(path, encoding="utf-8-sig") as file:  # may have a byte order mark
            lines = file.read().splitlines()
    except (OSError, ValueError):
        return False  # vLLM says what is wrong with it
    option = ""
    for line in lines:
        if line and line[0] not in " \t#-}]":
            option = line.partition(":")[0].strip("\"' ").replace("_", "-")
        named = option == "worker-cls" and _WORKER in line
        if named or (option.split(".")[0] == "additional-config" and _KEY in line):
            return True
    return False


def _caller_enables() -> bool:
    frame = inspect.currentframe()
    for _ in range(_DEPTH):
        if frame is None:
            return False
        values = frame.f_locals
        candidates = [values.get("vllm_config"), values.get("self")]
        kwargs = values.get("kwargs")
        if isinstance(kwargs, dict):
            candidates.append(kwargs.get("vllm_config"))
        if any(_enables(candidate) for candidate in candidates):
            return True
        frame = frame.f_back
    return False


def _enables(value: Any) -> bool:
    if _is_worker(getattr(value, "__dict__", {}).get("worker_cls")):
        return True
    for holder in (value, getattr(value, "__dict__", {}).get("vllm_config")):
        additional = getattr(holder, "__dict__", {}).get("additional_config")
        if isinstance(additional, dict) and additional.get(_KEY) not in (None, False):
            return True
    return False


def _is_worker(value: Any) -> bool:
    """Return whether this is midstream's worker class: its name, or the class pickled by vLLM."""
    if isinstance(value, bytes):
        return all(name.encode() in value for name in _WORKER.rsplit(".", 1))
    return bool(value == _WORKER)
