"""How much memory of the machine an arena may take."""

from __future__ import annotations

import tempfile
from pathlib import Path

import psutil

from midstream.config.config import Config
from midstream.transport.arena import ArenaSettings

_SHARE = 4
_MOST = 64 << 30
_LEAST_SEGMENT = 1 << 20
_MOST_SEGMENT = 256 << 20
_SEGMENTS = 64
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
    return ArenaSettings(budget, _segment(budget), config.overflow, Path(folder))


def _segment(budget: int) -> int:
    """Bytes of a segment: large ones are mapped and pinned seldom, small ones are free again soon.
    A power of two.
    """
    most = min(_MOST_SEGMENT, max(_LEAST_SEGMENT, budget // _SEGMENTS))
    return int(1 << (most.bit_length() - 1))


def _available() -> int:
    """Bytes of memory that can be taken: of the machine, or of the group that it is limited to."""
    available = int(psutil.virtual_memory().available)
    try:
        limit = (_GROUP / "memory.max").read_text().strip()
        used = (_GROUP / "memory.current").read_text()
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))
