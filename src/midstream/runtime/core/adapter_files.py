"""What is in the files of LoRA adapters: workers read them again whenever an adapter comes back
that others had displaced, and tell nobody.
"""

from __future__ import annotations

import hashlib
import os

_PREFIX = "adapter_"  # of the files that vLLM reads
_CHUNK = 1 << 20
Signature = tuple[tuple[str, int, int, int, int], ...]


class AdapterFiles:
    """What was in each adapter's files at the last look, by vLLM's number and its path."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[Signature, bytes]] = {}

    def have_changed(self, number: int, path: str) -> bool:
        """Look at an adapter's files; return whether something else is in them than before."""
        signature, known = _signature(path), self._known.get((number, path))
        if known is not None and known[0] == signature:
            return False
        digest = _digest(path, signature)
        self._known[number, path] = signature, digest
        return known is not None and known[1] != digest

    def forget(self, number: int) -> None:
        """Forget an adapter's files, which workers read before the next request with it."""
        for key in [key for key in self._known if key[0] == number]:
            del self._known[key]


def _signature(path: str) -> Signature:
    """Return what changes whenever an adapter's files do; empty: they are not on this machine."""
    try:
        with os.scandir(os.path.expanduser(path)) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries if _is_read(entry)]
    except OSError:
        return ()
    return tuple(
        sorted(
            (name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
            for name, stat in stats
        )
    )


def _is_read(entry: os.DirEntry[str]) -> bool:
    return entry.name.startswith(_PREFIX) and entry.is_file()


def _digest(path: str, signature: Signature) -> bytes:
    digest = hashlib.blake2b()
    for name, *_ in signature:
        digest.update(os.fsencode(name) + b"\0")
        try:
            with open(os.path.join(os.path.expanduser(path), name), "rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        except OSError as error:
            digest.update(repr(error).encode())
    return digest.digest()
