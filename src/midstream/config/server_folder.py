"""Private folder of a server's several API processes, whose parent makes and removes it."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from midstream.errors import ConfigError

VARIABLE = "MIDSTREAM_SERVER_FOLDER"


def make_folder() -> None:
    """Make the folder, once, in the process that starts the others."""
    owner, _, _ = os.environ.get(VARIABLE, "").partition(":")
    if owner != str(os.getpid()):
        # It has sockets, whose paths are short: no longer than this.
        folder = tempfile.mkdtemp(prefix="midstream-")
        os.environ[VARIABLE] = f"{os.getpid()}:{folder}"
        atexit.register(_remove, os.getpid(), folder)


def own_folder() -> Path:
    """Return the folder that the parent of this process has made."""
    owner, _, folder = os.environ.get(VARIABLE, "").partition(":")
    if owner != str(os.getppid()) or not Path(folder).is_dir():
        raise ConfigError(
            "midstream: the process that started this API server process did not load midstream; "
            "start the server with `midstream serve` or `vllm serve`"
        )
    return Path(folder)


def remove_if_left() -> None:
    """Remove the folder if the process that made it was killed, and could not do it."""
    owner, _, folder = os.environ.get(VARIABLE, "").partition(":")
    if owner and owner != str(os.getppid()):
        shutil.rmtree(folder, ignore_errors=True)


def _remove(process: int, folder: str) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(folder, ignore_errors=True)
