"""Stores in folders of the local file system."""

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

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.store.backends.base import File, Folder, is_left, is_shard_name

_MAX_PIECES = 1024  # buffers per writev: Linux's IOV_MAX
_WRITE_BYTES = 8 << 20  # bytes that are buffered before a write
_MAX_MAPPED = 128  # files; each uses a descriptor
# Errors of file systems that do not support fsync for directories.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def folder_of(root: str | os.PathLike[str]) -> Folder:
    """Return the folder at a path or URL such as `s3://bucket/prefix`."""
    try:
        path = os.fsdecode(root)
    except TypeError:
        raise StoreError(f"expected a path or URL, got `{type(root).__name__}`") from None
    # pathlib removes one slash of a URL; the result must not be taken for a directory `s3:`.
    if "://" not in path and not path.startswith(("s3:/", "gs:/", "az:/")):
        return LocalFolder(path)
    from midstream.store.backends.cloud import CloudFolder

    return CloudFolder(path)


def local_folder_of(root: str | os.PathLike[str]) -> LocalFolder:
    folder = folder_of(root)
    if not isinstance(folder, LocalFolder):
        raise StoreError(
            f"{folder}: unsupported here; expected a local directory, such as one into which "
            f"`midstream store merge {folder} --into DIR` copies the store"
        )
    return folder


class LocalFolder:
    """A local directory with memory-mapped shards; see `Folder`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._mapped: OrderedDict[str, _Mapped] = OrderedDict()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return self.root

    # A mapping cannot be used by another process, so unpickling starts without any.
    def __reduce__(self) -> tuple[type[LocalFolder], tuple[str]]:
        return (LocalFolder, (self.root,))

    def names(self) -> list[str]:
        with self._named():
            return sorted(filter(is_shard_name, os.listdir(self.root)))

    def others(self) -> list[str]:
        with self._named():
            names = os.listdir(self.root)
        return sorted(name for name in names if not (is_shard_name(name) or is_left(name)))

    def open(self, name: str) -> File:
        with self._lock:
            mapped = self._mapped.get(name)
            if mapped is None:
                with self._named(name):
                    mapped = self._mapped[name] = _Mapped(os.path.join(self.root, name))
                if len(self._mapped) > _MAX_MAPPED:
                    self._mapped.popitem(last=False)
            self._mapped.move_to_end(name)
            return mapped

    def make(self) -> None:
        with self._named():
            if os.path.lexists(self.root) and not os.path.isdir(self.root):
                raise StoreError(f"{self.root}: expected a directory, got another kind of file")
            _make_directory(os.path.abspath(self.root))
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise StoreError(f"{self.root}: the directory is not writable")

    def put(self, name: str, pieces: Iterable[memoryview]) -> None:
        temporary = os.path.join(self.root, temporary_name(name))
        with self._named(name):
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
                file = os.open(temporary, flags, 0o666)
                try:
                    write_pieces(file, pieces)
                    os.fsync(file)
                finally:
                    os.close(file)
                os.rename(temporary, os.path.join(self.root, name))
            except BaseException:
                # A temporary that remains is not taken for a shard, and `prune` removes it.
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
        """Rename a shard to `NAME.damaged`, which is not read as a shard."""
        with self._named(name), self._lock:
            self._mapped.pop(name, None)
            path = os.path.join(self.root, name)
            os.rename(path, f"{path}.damaged")
            _sync_directory(self.root)

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock for operations that remove shards. Writers do not take this lock."""
        with self._named():
            lock = os.open(os.path.join(self.root, ".lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            # The kernel releases the lock if the process dies.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise StoreError(f"{self.root}: another merge or prune is running") from None
        finally:
            os.close(lock)

    def temporaries(self, older_than_s: float) -> list[str]:
        """Return the names of temporaries that were not written to for `older_than_s` seconds."""
        names = []
        now = time.time()
        with self._named():
            for file in os.scandir(self.root):
                with contextlib.suppress(FileNotFoundError):
                    if is_temporary(file.name) and now - file.stat().st_mtime >= older_than_s:
                        names.append(file.name)
        return sorted(names)

    def sweep(self, names: Iterable[str]) -> None:
        with self._named():
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.root, name))

    @contextlib.contextmanager
    def _named(self, name: str = "") -> Iterator[None]:
        """Raise OSErrors of the block as a StoreError with the path in its message."""
        where = os.path.join(self.root, name) if name else self.root
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            if not name and error.errno == errno.ENOENT:
                raise StoreError(f"{where}: no such store: the directory does not exist") from None
            raise StoreError(f"{where}: {error.strerror or error}") from error
        except ValueError as error:
            # The path contains a null byte.
            raise StoreError(f"{where!r}: {error}") from None


def temporary_name(name: str) -> str:
    """Return the name of a shard's file while it is written: hidden, and not a shard name."""
    return f".{name}.tmp"


def is_temporary(name: str) -> bool:
    """Whether `name` is a result of `temporary_name`."""
    return is_shard_name(name.removeprefix(".").removesuffix(".tmp")) and (
        name == temporary_name(name[1:-4])
    )


class _Mapped:
    def __init__(self, path: str) -> None:
        # O_NONBLOCK: opening a named pipe would otherwise block.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            file_stat = os.fstat(file)
            if not stat.S_ISREG(file_stat.st_mode):
                raise StoreError(f"{path}: not a regular file")
            if not file_stat.st_size:
                raise StoreError(f"{path}: truncated: the file is empty")
            self.size = file_stat.st_size
            self._bytes = mmap.mmap(file, self.size, access=mmap.ACCESS_READ)
        finally:
            os.close(file)

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self._bytes)[start:stop]

    @property
    def address(self) -> int:
        return int(np.frombuffer(self._bytes, np.uint8).ctypes.data)

    def will_need(self, start: int, stop: int) -> None:
        start -= start % mmap.PAGESIZE
        if stop > start:
            self._bytes.madvise(mmap.MADV_WILLNEED, start, stop - start)

    def gather(self, start: int, width: int, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        count = int(rows.max(initial=-1)) + 1
        table: NDArray[np.uint8] = np.frombuffer(
            self._bytes, np.uint8, count * width, start
        ).reshape(count, width)
        return table.take(rows, axis=0)


def write_pieces(file: int, pieces: Iterable[memoryview]) -> None:
    """Write all pieces in order without concatenating them."""
    waiting: list[memoryview] = []
    start = stop = 0
    for piece in pieces:
        waiting.append(piece)
        stop += len(piece)
        if len(waiting) == _MAX_PIECES or stop - start >= _WRITE_BYTES:
            _write_now(file, waiting)
            # Starts writeback now, while further pieces are prepared, instead of at the fsync.
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
    """Create a directory and its parents, and sync each into its parent."""
    if os.path.isdir(path):
        return
    above = os.path.dirname(path)
    _make_directory(above)
    os.makedirs(path, exist_ok=True)
    _sync_directory(above)
