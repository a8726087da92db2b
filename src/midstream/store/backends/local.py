"""Where shards are kept: all that the store asks of a file system, and the local one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.store.format.layout import is_shard_name

_MOST_PIECES = 1024  # buffers in one writev: Linux's IOV_MAX
_AT_ONCE = 8 << 20  # bytes that are handed over together
_MOST_MAPPED = 128  # files; each holds a descriptor
# What file systems say that have no fsync for folders.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


class File(Protocol):
    """A shard's bytes. It never changes."""

    @property
    def size(self) -> int:
        """Its length."""
        ...

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop), which are within the file. They may be mapped: do not write."""
        ...

    def gather(self, start: int, width: int, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """A copy, uint8 [len(rows), width]: row i is the `width` bytes at start + rows[i] · width.

        Args:
            rows: in any order, all of them within the file.
        """
        ...


class Folder(Protocol):
    """The shards of one store. Every method raises StoreError, and names the folder in it."""

    def names(self) -> list[str]:
        """The shards' names, ascending. Raises if there is no such folder."""
        ...

    def open(self, name: str) -> File:
        """A shard; cheap when it was opened before. Raises if there is none of this name."""
        ...

    def make(self) -> None:
        """Sees to it that the folder is there, and can be written to."""
        ...

    def put(self, name: str, pieces: Iterable[memoryview]) -> None:
        """Writes a shard: when this returns, it is there and will survive a crash; if it raises,
        either nothing is there or all of it. It takes the place of one of the same name.
        """
        ...

    def delete(self, name: str) -> None:
        """Removes a shard, if it is there."""
        ...


def folder_of(root: str | os.PathLike[str]) -> Folder:
    """The folder at a path, or under a URL: `s3://bucket/prefix`.

    Raises:
        StoreError: neither; or a URL of another kind.
    """
    try:
        path = os.fsdecode(root)
    except TypeError:
        raise StoreError(f"expected a path or URL, got `{type(root).__name__}`") from None
    # A Path of a URL has lost a slash; it would be a directory called `s3:`.
    if "://" not in path and not path.startswith("s3:/"):
        return LocalFolder(path)
    from midstream.store.backends.s3 import CloudFolder

    return CloudFolder(path)


def local_folder_of(root: str | os.PathLike[str]) -> LocalFolder:
    """The folder at a path.

    Raises:
        StoreError: not a path.
    """
    folder = folder_of(root)
    if not isinstance(folder, LocalFolder):
        raise StoreError(f"{folder}: this is done in a directory only")
    return folder


class LocalFolder:
    """A directory. Shards are memory-mapped; see `Folder`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._mapped: OrderedDict[str, _Mapped] = OrderedDict()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return self.root

    # A mapping belongs to its process.
    def __reduce__(self) -> tuple[type[LocalFolder], tuple[str]]:
        return (LocalFolder, (self.root,))

    def names(self) -> list[str]:
        with self._named():
            return sorted(filter(is_shard_name, os.listdir(self.root)))

    def open(self, name: str) -> File:
        with self._lock:
            found = self._mapped.get(name)
            if found is None:
                with self._named(name):
                    found = self._mapped[name] = _Mapped(os.path.join(self.root, name))
                if len(self._mapped) > _MOST_MAPPED:
                    self._mapped.popitem(last=False)
            self._mapped.move_to_end(name)
            return found

    def make(self) -> None:
        with self._named():
            if os.path.lexists(self.root) and not os.path.isdir(self.root):
                raise StoreError(f"{self.root}: expected a directory, and this is none")
            _make_directory(os.path.abspath(self.root))
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise StoreError(f"{self.root}: this directory cannot be written to")

    def put(self, name: str, pieces: Iterable[memoryview]) -> None:
        temporary = os.path.join(self.root, temporary_name(name))
        with self._named(name):
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                file = os.open(temporary, flags, 0o666)
                try:
                    _write(file, pieces)
                    os.fsync(file)
                finally:
                    os.close(file)
                os.rename(temporary, os.path.join(self.root, name))
            except BaseException:
                # Whatever is left is no shard, and `prune` finds it.
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            _sync_directory(self.root)

    def delete(self, name: str) -> None:
        with self._named(name), self._lock:
            self._mapped.pop(name, None)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.root, name))
                _sync_directory(self.root)

    def set_aside(self, name: str) -> None:
        """Makes a shard a file that is none, `NAME.damaged`."""
        with self._named(name), self._lock:
            self._mapped.pop(name, None)
            path = os.path.join(self.root, name)
            os.rename(path, f"{path}.damaged")
            _sync_directory(self.root)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """For work that takes shards away: done by one process at a time. Writers go on.

        Raises:
            StoreError: another process is at it.
        """
        with self._named():
            lock = os.open(os.path.join(self.root, ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # Of a process that died, nothing is locked.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise StoreError(f"{self.root}: another merge or prune of it is under way") from None
        finally:
            os.close(lock)

    def temporaries(self, older_than_s: float) -> list[str]:
        """What interrupted writes left, and nothing was written to for so long, by name."""
        found = []
        now = time.time()
        with self._named():
            for file in os.scandir(self.root):
                with contextlib.suppress(FileNotFoundError):
                    if is_temporary(file.name) and now - file.stat().st_mtime >= older_than_s:
                        found.append(file.name)
        return sorted(found)

    def sweep(self, names: Iterable[str]) -> None:
        """Removes temporaries."""
        with self._named():
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.root, name))

    @contextlib.contextmanager
    def _named(self, name: str = "") -> Iterator[None]:
        """What the system refuses is raised as a StoreError that says where."""
        where = os.path.join(self.root, name) if name else self.root
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            if not name and error.errno == errno.ENOENT:
                raise StoreError(f"{where}: there is no store here, and no directory") from None
            raise StoreError(f"{where}: {error.strerror or error}") from error
        except ValueError as error:
            # A null byte in the name.
            raise StoreError(f"{where!r}: {error}") from None


def temporary_name(name: str) -> str:
    """The name that a shard has while it is written: hidden, and no shard's."""
    return f".{name}.tmp"


def is_temporary(name: str) -> bool:
    """Whether a name is one of `temporary_name`."""
    return is_shard_name(name.removeprefix(".").removesuffix(".tmp")) and (
        name == temporary_name(name[1:-4])
    )


class _Mapped:
    """A file of the local file system; see `File`."""

    def __init__(self, path: str) -> None:
        # A pipe of this name would wait for a writer.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise StoreError(f"{path}: not a file")
            if not found.st_size:
                raise StoreError(f"{path}: truncated: the file is empty")
            self._bytes = mmap.mmap(file, found.st_size, access=mmap.ACCESS_READ)
        finally:
            os.close(file)

    @property
    def size(self) -> int:
        return len(self._bytes)

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self._bytes)[start:stop]

    def gather(self, start: int, width: int, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        count = int(rows.max(initial=-1)) + 1
        table: NDArray[np.uint8] = np.frombuffer(
            self._bytes, np.uint8, count * width, start
        ).reshape(count, width)
        return table.take(rows, axis=0)


def _write(file: int, pieces: Iterable[memoryview]) -> None:
    """All of them, one after the other, without putting them together first."""
    waiting: list[memoryview] = []
    start = stop = 0
    for piece in pieces:
        waiting.append(piece)
        stop += len(piece)
        if len(waiting) == _MOST_PIECES or stop - start >= _AT_ONCE:
            _write_now(file, waiting)
            # The disk begins with these while the next ones are made, instead of with the fsync.
            os.posix_fadvise(file, start, stop - start, os.POSIX_FADV_DONTNEED)
            waiting, start = [], stop
    _write_now(file, waiting)


def _write_now(file: int, pieces: list[memoryview]) -> None:
    while pieces:
        written = os.writev(file, pieces)
        done = 0
        while done < len(pieces) and written >= len(pieces[done]):
            written -= len(pieces[done])
            done += 1
        pieces = pieces[done:]
        if written:
            pieces[0] = pieces[0][written:]


def _sync_directory(path: str) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(directory)


def _make_directory(path: str) -> None:
    """The directory and those above it, each of them durable in the one above."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    _make_directory(above)
    os.makedirs(path, exist_ok=True)
    _sync_directory(above)
