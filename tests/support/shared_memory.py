"""Shared memory that processes map, by the names and inodes of its anonymous files."""

import re
from collections.abc import Iterable
from pathlib import Path

# address, permissions, offset, device, inode, name
_MAPPED = re.compile(r"^\S+ \S+ \S+ (\S+) (\d+)\s+/memfd:(\S+)", re.MULTILINE)


def mapped(pids: Iterable[int] | None = None) -> set[tuple[str, str, str]]:
    """Return (device, inode, name) of each anonymous file that some processes map."""
    if pids is None:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    found: set[tuple[str, str, str]] = set()
    for pid in pids:
        try:
            found.update(_MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))
        except OSError:
            continue  # it has ended, or is not ours
    return found
