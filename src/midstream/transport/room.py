"""How much memory of the machine an arena may take."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil

from midstream.config import Config
from midstream.transport.arena import SEGMENT_BYTES, ArenaSettings

_SHARE = 4
_MOST = 64 << 30
_GROUP = Path("/sys/fs/cgroup")


def arena_settings(config: Config, workers: int) -> ArenaSettings:
    """The arena of one of several workers of this machine, by midstream's settings.

    Args:
        config: the settings.
        workers: how many of them share the memory.
    """
    budget = config.arena_bytes
    if budget is None:
        budget = min(_MOST, _available() // _SHARE) // workers
    folder = config.spill_dir or tempfile.gettempdir()
    return ArenaSettings(max(budget, SEGMENT_BYTES), config.overflow, Path(folder))


def _available() -> int:
    """Bytes of memory that can be taken: of the machine, or of the group that it is limited to."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        used = (_GROUP / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))
