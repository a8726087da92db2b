"""Files that this process has open, of the kinds that a test is about."""

import os

MEMORY = "/memfd:midstream"  # memory of arenas, and rows that a server holds
SPILLED = "/midstream-spill-"  # memory of arenas on disk
SOCKET = "socket:["
PIPE = "pipe:["


def open_files(*kinds: str) -> set[tuple[int, str, int]]:
    """Return (descriptor, name, inode) of the open files whose names have one of `kinds`. All other
    files are left out: threads, imports and garbage of earlier tests open and close some at any
    time. So a test compares sets, `open_files() <= before`, rather than counts.
    """
    kinds = kinds or (MEMORY, SPILLED)
    found = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if any(kind in name for kind in kinds):
                found.add((descriptor, name, os.fstat(descriptor).st_ino))
        except OSError:
            continue  # closed meanwhile, as the descriptor that listed the others
    return found
