"""Store backend for `s3://`, `gs://` and `az://bucket/prefix`, by s3fs, gcsfs and adlfs. An object
appears whole, so a shard is one upload; the block cache here is bounded over all files of a store.
obstore's threads are gone in a forked process, such as a reader of PyTorch's, where it hangs.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.store.backends.base import is_left, is_shard_name

# Written by `make`, to distinguish an empty store from a mistyped URL.
MARKER = ".midstream"

# Beginnings of environment variables that they read.
_VARIABLES = ("AWS_", "AZURE_", "GCSFS_", "GOOGLE_", "STORAGE_EMULATOR_HOST")
_URL = re.compile(r"(s3|gs|az)://([a-z0-9][a-z0-9._-]{1,61}[a-z0-9](?:/[^/?#]+)*)/?")
_BLOCK = 1 << 20  # bytes per fetched and cached block
_MAX_CACHED = 256  # blocks
_MAX_RANGE = 32 * _BLOCK  # bytes per read of neighbouring rows


class CloudFolder:
    """The objects under a prefix; see `Folder`. Up to 256 blocks of 1 MiB are cached."""

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise StoreError(
                f"{url!r}: expected a path or a string s3://bucket/prefix (or gs://, az://)"
            )
        self._url = url
        self._scheme, self._path = match[1], match[2]
        self._files: dict[str, _Object] = {}
        self._cache: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._connected()

    def __str__(self) -> str:
        return f"{self._scheme}://{self._path}"

    # A connection cannot be used by another process, so unpickling makes a new one.
    def __reduce__(self) -> tuple[type[CloudFolder], tuple[str]]:
        return (CloudFolder, (self._url,))

    def names(self) -> list[str]:
        return sorted(filter(is_shard_name, self._listed()))

    def others(self) -> list[str]:
        return sorted(name for name in self._listed() if not (is_shard_name(name) or is_left(name)))

    def _listed(self) -> list[str]:
        with self._named():
            try:
                paths = self._connected(fresh=True).ls(self._path, detail=False)
            except FileNotFoundError:
                raise StoreError(
                    f"{self}: no such store: there is no such bucket or object"
                ) from None
        parent = f"{self._path}/"
        return [path.removeprefix(parent) for path in paths if path.startswith(parent)]

    def open(self, name: str) -> _Object:
        with self._lock:
            stored = self._files.get(name)
        if stored is None:
            with self._named(name):
                size = self._connected(fresh=True).info(f"{self._path}/{name}")["size"]
            if not size:
                raise StoreError(f"{self}/{name}: truncated: the object is empty")
            stored = _Object(self, name, int(size))
            with self._lock:
                self._files[name] = stored
        return stored

    def make(self) -> None:
        with self._named():
            self._connected().pipe_file(f"{self._path}/{MARKER}", b"")

    def put(self, name: str, pieces: Iterable[memoryview]) -> None:
        # One buffer: an s3fs file that is closed by an exception uploads what was written so far.
        data = b"".join(pieces)
        with self._named(name):
            self._connected().pipe_file(f"{self._path}/{name}", data)
        self._forget(name)

    def delete(self, name: str) -> None:
        with self._named(name), contextlib.suppress(FileNotFoundError):
            self._connected().rm_file(f"{self._path}/{name}")
        self._forget(name)

    def blocks(self, name: str, size: int, first: int, last: int) -> list[bytes]:
        """Return blocks [first, last) of a shard; blocks that are not cached are fetched."""
        blocks: dict[int, bytes] = {}
        with self._lock:
            for block in range(first, last):
                cached = self._cache.get((name, block))
                if cached is not None:
                    self._cache.move_to_end((name, block))
                    blocks[block] = cached
        for start, stop in _gaps(blocks, first, last):
            data = self._fetch(name, start * _BLOCK, min(stop * _BLOCK, size))
            for block in range(start, stop):
                offset = (block - start) * _BLOCK
                blocks[block] = data[offset : offset + _BLOCK]
            with self._lock:
                for block in range(start, stop):
                    self._cache[name, block] = blocks[block]
                while len(self._cache) > _MAX_CACHED:
                    self._cache.popitem(last=False)
        return [blocks[block] for block in range(first, last)]

    def _fetch(self, name: str, start: int, stop: int) -> bytes:
        with self._named(name):
            data = self._connected().cat_file(f"{self._path}/{name}", start=start, end=stop)
        if len(data) != stop - start:
            raise StoreError(
                f"{self}/{name}: expected bytes {start} to {stop}, got {len(data)} bytes"
            )
        return bytes(data)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._files.pop(name, None)
            for key in [key for key in self._cache if key[0] == name]:
                del self._cache[key]

    def _connected(self, fresh: bool = False) -> Any:
        variables = (item for item in os.environ.items() if item[0].startswith(_VARIABLES))
        with self._named():
            client = _client(self._scheme, os.getpid(), tuple(sorted(variables)))
            if fresh:
                client.invalidate_cache()
            return client

    @contextlib.contextmanager
    def _named(self, name: str = "") -> Iterator[None]:
        """Raise every error of the block as a StoreError with the location in its message."""
        where = f"{self}/{name}" if name else str(self)
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError:
            raise StoreError(f"{where}: there is no such bucket or object") from None
        except ImportError as error:
            raise StoreError(f'{where}: {error}; pip install "midstream[cloud]"') from None
        except Exception as error:
            # botocore, aiohttp and asyncio each raise exceptions of their own.
            told = str(error).partition("\n")[0]
            raise StoreError(f"{where}: {type(error).__name__}: {told}") from error


class _Object:
    def __init__(self, folder: CloudFolder, name: str, size: int) -> None:
        self._folder = folder
        self._name = name
        self.size = size

    def read(self, start: int, stop: int) -> memoryview:
        if stop <= start:
            return memoryview(b"")
        first = start // _BLOCK
        blocks = self._folder.blocks(self._name, self.size, first, -(-stop // _BLOCK))
        data = blocks[0] if len(blocks) == 1 else b"".join(blocks)
        return memoryview(data)[start - first * _BLOCK : stop - first * _BLOCK]

    @property
    def address(self) -> None:
        return None

    def will_need(self, start: int, stop: int) -> None:
        """Do nothing: blocks are fetched when they are read."""

    def gather(self, start: int, width: int, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        gathered = np.empty((len(rows), width), np.uint8)
        order = np.argsort(rows, kind="stable")
        for places in _near(rows, order, width):
            low, high = int(rows[places[0]]), int(rows[places[-1]]) + 1
            part = self.read(start + low * width, start + high * width)
            table = np.frombuffer(part, np.uint8).reshape(high - low, width)
            gathered[places] = table[rows[places] - low]
        return gathered


@functools.lru_cache(maxsize=4)
def _client(scheme: str, process: int, environment: tuple[tuple[str, str], ...]) -> Any:
    """Return the client: a fork lacks its thread, and other settings need another."""
    made: Any
    if scheme == "gs":
        from gcsfs.core import GCSFileSystem

        made = GCSFileSystem
    elif scheme == "az":
        from adlfs import AzureBlobFileSystem

        made = AzureBlobFileSystem
    else:
        from s3fs import S3FileSystem

        made = S3FileSystem
    return made(skip_instance_cache=True, use_listings_cache=False)


def _gaps(blocks: dict[int, bytes], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the runs [start, stop) of blocks in [first, last) that are missing from `found`."""
    start = None
    for block in range(first, last + 1):
        missing = block < last and block not in blocks
        if missing and start is None:
            start = block
        elif not missing and start is not None:
            yield start, block
            start = None


def _near(
    rows: NDArray[np.int64], order: NDArray[np.int64], width: int
) -> Iterator[NDArray[np.int64]]:
    """Split the `order` that sorts `rows` into parts without long gaps, within `_MAX_RANGE`."""
    gaps = np.flatnonzero(np.diff(rows[order]) * width > _BLOCK) + 1
    most = max(1, _MAX_RANGE // width)
    for part in np.split(order, gaps):
        if len(part):
            spans = (rows[part] - rows[part[0]]) // most
            yield from np.split(part, np.flatnonzero(np.diff(spans)) + 1)
