"""Default arena sizes from the machine's available memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil

from midstream.config.config import Config
from midstream.transport.arena import ArenaSettings

_SHARE = 4  # the arenas take at most 1/4 of the available memory
_MAX_BUDGET = 64 << 30
_MIN_SEGMENT = 1 << 20
_MAX_SEGMENT = 256 << 20
_SEGMENTS = 64  # segments per budget, within these limits
_CGROUP = Path("/sys/fs/cgroup")


def arena_settings(config: Config, workers: int) -> ArenaSettings:
    """Return the arena settings of one of the workers that share this machine's memory."""
    budget = config.arena_bytes
    if budget is None:
        budget = min(_MAX_BUDGET, _available() // _SHARE) // workers
    folder = config.spill_dir or tempfile.gettempdir()
    # A power of two: large segments are mapped and pinned less often, small ones free sooner.
    most = min(_MAX_SEGMENT, max(_MIN_SEGMENT, budget // _SEGMENTS))
    segment = 1 << (most.bit_length() - 1)
    return ArenaSettings(budget, segment, config.overflow, Path(folder))


def _available() -> int:
    """Return the available memory in bytes, of the machine or within its cgroup limit."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = (_CGROUP / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))
