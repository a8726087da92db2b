"""This process and a Ray cluster: connected to one that runs, or to one that is made for it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from midstream.console import defaults
from midstream.errors import EngineError, UnsupportedError
from midstream.jobs.ray.placement import AUTO, LOCAL, Placement

# Before, an actor whose calls run together does not start beside the uvloop that vLLM brings.
OLDEST = (2, 55)

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise engines that need no GPU see all of them, with a warning from each.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}
"""Defaults that a user's own settings override."""

# Where `ray start` notes the address of the cluster that it has started on a machine.
_CURRENT = "ray_current_cluster"
# Of folders, before the number of the process that each belongs to.
_PREFIX = "ms-ray-"


@contextmanager
def connected(spread: Placement) -> Iterator[Any]:
    """Ray, with this process connected to a cluster. One that was made for it ends with the block,
    with all its processes and files.

    Raises:
        UnsupportedError: Ray is not installed.
        EngineError: there is no cluster at the address, or none can be started.
    """
    with defaults(ENVIRONMENT):
        ray = import_ray()
        if ray.is_initialized():
            yield ray
            return
        with _own_files() as folder:
            address = _address(spread.address)
            settings: dict[str, Any] = {"address": address}
            if address == LOCAL:
                settings |= {"include_dashboard": False, "_temp_dir": folder}
            try:
                _init(
                    ray,
                    log_to_driver=spread.log,
                    logging_level=logging.INFO if spread.log else logging.ERROR,
                    **settings,
                )
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise EngineError(f"Ray at {address}: {error}") from error
            try:
                yield ray
            finally:
                ray.shutdown()


def import_ray() -> Any:
    """Ray with Ray Data.

    Raises:
        UnsupportedError: it is not installed, or too old.
    """
    try:
        import ray
        import ray.data
    except ImportError:
        raise UnsupportedError('this needs Ray: pip install "midstream[ray]"') from None
    release = tuple(int(part) for part in re.findall(r"\d+", ray.__version__)[:2])
    if release < OLDEST:
        raise UnsupportedError(
            f"this needs Ray {'.'.join(map(str, OLDEST))} or later, and this is {ray.__version__}: "
            'pip install "midstream[ray]"'
        )
    return ray


def _address(asked: str) -> str:
    """The address to connect to; LOCAL: a cluster is to be started."""
    if asked != AUTO:
        return asked
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    # Ray would also take up any cluster that it finds a process of, another job's own among them.
    noted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", _CURRENT)
    try:
        return noted.read_text(encoding="ascii").strip() or LOCAL
    except OSError:
        return LOCAL


@contextmanager
def _own_files() -> Iterator[str]:
    """A folder for what Ray writes, which is gone afterwards. Its name is short: sockets are in it,
    whose paths may not be long.
    """
    above = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    _remove_left(above)
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=above)
    try:
        yield folder
    finally:
        # Its processes may be writing their last lines.
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left(above: str) -> None:
    """Removes what processes have left that were killed."""
    for folder in Path(above).glob(f"{_PREFIX}*-*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if process.isdecimal() and not os.path.exists(f"/proc/{process}"):
            shutil.rmtree(folder, ignore_errors=True)


def _init(ray: Any, **settings: Any) -> None:
    """Starts Ray; SIGTERM, which it takes for itself, stays whose it was."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**settings)
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
