"""Connection to a Ray cluster, either a running one or one started for this process."""

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
from midstream.lab.jobs.ray.placement import AUTO, LOCAL, Placement

# In older releases, an actor with concurrent calls does not start if uvloop is installed, which is
# a dependency of vLLM.
OLDEST = (2, 55)

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise engines that need no GPU see all of them, and each prints a warning.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
}
"""Defaults that a user's own settings override."""

# File in which `ray start` records the address of a machine's cluster.
_CURRENT = "ray_current_cluster"
# Prefix of temporary folders, followed by the id of their process.
_PREFIX = "ms-ray-"


@contextmanager
def connected(spread: Placement) -> Iterator[Any]:
    """Connect to a cluster and return the module `ray`; end a cluster that was started for this."""
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
    """Import Ray and Ray Data, and return the module `ray`."""
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


def _address(requested: str) -> str:
    """Return the address to connect to; LOCAL: start a cluster."""
    if requested != AUTO:
        return requested
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    # Ray's own detection also connects to clusters that other jobs started for themselves.
    noted = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "ray", _CURRENT)
    try:
        return noted.read_text(encoding="ascii").strip() or LOCAL
    except OSError:
        return LOCAL


@contextmanager
def _own_files() -> Iterator[str]:
    """Create a folder for Ray's files, with a short name for socket paths; delete it on exit."""
    above = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    _remove_left(above)
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=above)
    try:
        yield folder
    finally:
        # Ray's processes may still be writing log files.
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left(above: str) -> None:
    """Delete the folders of processes that were killed."""
    for folder in Path(above).glob(f"{_PREFIX}*-*"):
        process = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if process.isdecimal() and not os.path.exists(f"/proc/{process}"):
            shutil.rmtree(folder, ignore_errors=True)


def _init(ray: Any, **settings: Any) -> None:
    """Run `ray.init` and restore the handler of SIGTERM, which it replaces."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**settings)
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)
