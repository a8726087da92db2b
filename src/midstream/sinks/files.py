"""Sinks `npz` and `filesystem`, see `docs/sinks.md`. A folder appears by a rename, after its files
were synced; nothing is overwritten; `.*.part` are unfinished.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from midstream.errors import ExistsError, SpecError
from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Delivery, Origin, Sink
from midstream.sinks.daemon_threads import in_threads
from midstream.sinks.manifest import VERSION, manifest_of
from midstream.sinks.name_claims import NameClaims
from midstream.sinks.npz_arrays import Arrays, arrays_of, described, forms

MANIFEST = "manifest.json"
LOCKS = ".names.lock"  # its bytes are locked for the ids of running requests
SHARD_FORMAT = "midstream.npz-shards"
PER_FILE, PACKED, SHARDED = LAYOUTS = ("per_file", "packed", "sharded")
ROWS = "rows.npz"
_SYNC_THREADS = 8
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Folder:
    """A written folder that is not yet renamed to its final name."""

    parents: tuple[str, ...]  # names of the folders between the root and this one
    part: str
    name: str
    files: tuple[str, ...]
    manifest: dict[str, Any]  # with full paths, as the caller gets it


class FileSink(Sink):
    """Writes npz files; see the module. Reading them requires only NumPy."""

    group_seconds = 0.01
    layouts = LAYOUTS
    keeps = ("attention", "norms")

    def __init__(self, root: str, layout: str = PER_FILE) -> None:  # of captures that name none
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)}, got {layout!r}")
        self._layout = layout
        if not isinstance(root, str) or not root:
            raise ValueError(f"root: expected the path of a folder, got {root!r}")
        self._root = os.path.abspath(os.path.expanduser(root))
        self._origin: Origin | None = None
        self._written: list[_Folder | Delivery] = []  # deliveries wait for their shard

    def open(self, origin: Origin) -> None:
        self._origin = origin
        os.makedirs(self._root, exist_ok=True)
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise PermissionError(f"{self._root} is not writable")
        self.names = NameClaims(os.path.join(self._root, LOCKS))

    def check(self, tag: str, request_id: str) -> None:
        """Reject a tag that is a link or a file, and an id that exists already."""
        try:
            with _folder_beneath(self._root, [tag] if tag else [], makes=False) as folder:
                if request_id and _is_there(request_id, folder):
                    raise ExistsError(
                        "request_id",
                        f"{os.path.join(self._root, tag, request_id)} exists already; use "
                        "another id",
                    )
        except FileNotFoundError:
            return
        except OSError as error:
            raise SpecError(
                "tag", f"{os.path.join(self._root, tag)} is not a folder: {error.strerror}"
            ) from None

    def write(self, delivery: Delivery) -> None:
        layout = delivery.layout or self._layout
        if layout == SHARDED:
            self._written.append(delivery)
            return
        parents = [delivery.tag] if delivery.tag else []
        name = delivery.name
        if delivery.completions > 1:
            parents.append(name)
            name = str(delivery.completion)
        self._written.append(
            self._make(parents, name, lambda folder: self._fill(delivery, layout, folder))
        )

    def flush(self) -> Sequence[CaptureResult]:
        written, self._written = self._written, []
        by_tag: dict[str, list[Delivery]] = {}
        for write in written:
            if isinstance(write, Delivery):
                by_tag.setdefault(write.tag, []).append(write)
        shards = {tag: self._make_shard(tag, deliveries) for tag, deliveries in by_tag.items()}
        folders = [folder for folder in written if isinstance(folder, _Folder)]
        folders += [shard for shard in shards.values() if isinstance(shard, _Folder)]
        by_folder = dict(zip(map(id, folders), self._finish(folders), strict=True))
        manifests = {
            tag: iter(shard.manifest["requests"])
            for tag, shard in shards.items()
            if isinstance(shard, _Folder)
        }
        results = []
        for write in written:
            shard = shards[write.tag] if isinstance(write, Delivery) else write
            if isinstance(shard, str):
                results.append(CaptureResult("error", shard))
                continue
            result = by_folder[id(shard)]
            if isinstance(write, Delivery) and result.status == "ok":
                result = replace(result, manifest=next(manifests[write.tag]))
            results.append(result)
        return results

    def _make(
        self, parents: Sequence[str], name: str, fill: Callable[[int], dict[str, Any]]
    ) -> _Folder:
        """Write a folder under its temporary name by `fill`, which returns its manifest."""
        path = os.path.join(self._root, *parents, name)
        part = f".{name}.{uuid.uuid4().hex}.part"
        with _folder_beneath(self._root, parents, makes=True) as parent:
            if _is_there(name, parent):
                raise FileExistsError(f"{path} exists already")
            os.mkdir(part, dir_fd=parent)
            folder = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
            try:
                manifest = fill(folder)
            except BaseException:
                _remove(part, folder, parent)
                raise
            finally:
                os.close(folder)
        requests = manifest.get("requests", [manifest])
        files = [file for request in requests for file in request["files"]]
        names = (*dict.fromkeys(file["path"] for file in files), MANIFEST)
        for file_info in files:
            file_info["path"] = os.path.join(path, file_info["path"])
        return _Folder(tuple(parents), part, name, names, manifest)

    def _make_shard(self, tag: str, deliveries: Sequence[Delivery]) -> _Folder | str:
        """Write a shard under its temporary name; return the error message if that fails."""
        name = f"shard-{uuid.uuid4().hex[:16]}"

        def fill(folder: int) -> dict[str, Any]:
            every: dict[str, Any] = {}
            requests = []
            for index, delivery in enumerate(deliveries):
                files, arrays = self._packed(delivery, f"{index}.")
                every |= arrays
                requests.append(manifest_of(delivery, self._described_origin, SHARDED, files))
            _write_arrays(ROWS, folder, every)
            manifest = {"format": SHARD_FORMAT, "version": VERSION, "requests": requests}
            _write_manifest(folder, manifest)
            return manifest

        try:
            return self._make([tag] if tag else [], name, fill)
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    def _finish(self, written: Sequence[_Folder]) -> Sequence[CaptureResult]:
        places = [(*folder.parents, folder.part) for folder in written]
        files = [
            (place, name)
            for place, folder in zip(places, written, strict=True)
            for name in (*folder.files, ".")
        ]
        synced = self._sync(files)
        moved = [
            synced.pop(place, "") or self._move(folder)
            for place, folder in zip(places, written, strict=True)
        ]
        for folder, problem in zip(written, moved, strict=True):
            if problem:
                _discard(self._root, folder)
        parents = self._sync([(folder.parents, ".") for folder in written])
        return [
            self._result(folder, problem or parents.get(folder.parents, ""))
            for folder, problem in zip(written, moved, strict=True)
        ]

    def _fill(self, delivery: Delivery, layout: str, folder: int) -> dict[str, Any]:
        """Write the files of one delivery; return its manifest, with file names as paths."""
        if layout == PACKED:
            files, every = self._packed(delivery)
            _write_arrays(ROWS, folder, every)
        else:
            files = []
            for description, arrays in self._taps(delivery):
                name = f"{description['site']}.{description['layer']}.npz"
                _write_arrays(name, folder, arrays)
                files.append({"path": name, **description})
        manifest = manifest_of(delivery, self._described_origin, layout, files)
        _write_manifest(folder, manifest)
        return manifest

    def _packed(
        self, delivery: Delivery, start: str = ""
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the description of each tap, and all arrays by prefix and name."""
        files: list[dict[str, Any]] = []
        every: dict[str, Any] = {}
        for description, arrays in self._taps(delivery):
            prefix = f"{start}{description['site']}.{description['layer']}."
            files.append({"path": ROWS, "prefix": prefix, **description})
            every.update((prefix + name, array) for name, array in arrays.items())
        return files, every

    def _taps(self, delivery: Delivery) -> Iterator[tuple[dict[str, Any], Arrays]]:
        for site, layer in delivery.activations:
            origin = self._described_origin
            width = origin.width((site, layer))
            arrays = arrays_of(delivery.activations, site, layer, width)
            rows, ranks = len(arrays["positions"]), list(delivery.ranks.get((site, layer), ()))
            description = {"site": site, "layer": layer, "rows": rows, "ranks": ranks}
            yield {**description, **described(arrays, width, origin.hidden_size)}, arrays
        for result in delivery.readouts.values():
            for (site, layer), form, arrays in result.stored():
                rows, ranks = len(arrays["positions"]), list(delivery.ranks.get((site, layer), ()))
                description = {"site": site, "layer": layer, "rows": rows, "ranks": ranks}
                yield {**description, **form, "arrays": forms(arrays), "scales": None}, arrays

    @property
    def _described_origin(self) -> Origin:
        assert self._origin is not None, "the sink is not open"
        return self._origin

    def _sync(self, files: Sequence[tuple[tuple[str, ...], str]]) -> dict[tuple[str, ...], str]:
        """Sync (folders from the root, name) in parallel; return the errors by folder."""

        def sync(file: tuple[tuple[str, ...], str]) -> str:
            folders, name = file
            try:
                with _folder_beneath(self._root, folders, makes=False) as folder:
                    _sync_file(name, folder)
            except OSError as error:
                return f"{type(error).__name__}: {error}"
            return ""

        distinct = list(dict.fromkeys(files))
        results = zip(distinct, in_threads(sync, distinct, _SYNC_THREADS), strict=True)
        return {folders: problem for (folders, _), problem in results if problem}

    def _move(self, folder: _Folder) -> str:
        """Rename a folder to its final name; return the error message, or an empty string."""
        try:
            with _folder_beneath(self._root, folder.parents, makes=False) as parent:
                os.rename(folder.part, folder.name, src_dir_fd=parent, dst_dir_fd=parent)
        except OSError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _result(self, folder: _Folder, problem: str) -> CaptureResult:
        if problem:
            return CaptureResult("error", problem)
        path = os.path.join(self._root, *folder.parents, folder.name)
        paths = tuple(os.path.join(path, name) for name in folder.files)
        return CaptureResult(paths=paths, manifest=folder.manifest)


def _write_arrays(name: str, folder: int, arrays: dict[str, Any]) -> None:
    with _new_file(name, folder) as file:
        np.savez(file, **arrays)


def _write_manifest(folder: int, manifest: dict[str, Any]) -> None:
    with _new_file(MANIFEST, folder) as file:
        file.write(json.dumps(manifest).encode())


def _new_file(name: str, folder: int) -> Any:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(name, flags, 0o666, dir_fd=folder), "wb")


def _discard(root: str, folder: _Folder) -> None:
    with (
        suppress(OSError),
        _folder_beneath(root, (*folder.parents, folder.part), makes=False) as part,
        _folder_beneath(root, folder.parents, makes=False) as parent,
    ):
        _remove(folder.part, part, parent)


def _remove(name: str, folder: int, parent: int) -> None:
    """Remove an unfinished folder; if that fails, its name still marks it as unfinished."""
    with suppress(OSError):
        for file in os.listdir(folder):
            os.unlink(file, dir_fd=folder)
        os.rmdir(name, dir_fd=parent)


def _sync_file(name: str, folder: int) -> None:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextmanager
def _folder_beneath(root: str, parts: Sequence[str], *, makes: bool) -> Iterator[int]:
    """Open a folder below an existing root, made durably if `makes`; yield its descriptor."""
    folder = os.open(root, _FOLDER)
    try:
        for part in parts:
            if makes:
                with suppress(FileExistsError):
                    os.mkdir(part, dir_fd=folder)
                    os.fsync(folder)
            inner = os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder
    finally:
        os.close(folder)


def _is_there(name: str, folder: int) -> bool:
    """Whether a folder has an entry of this name, including dangling links."""
    try:
        os.lstat(name, dir_fd=folder)
    except FileNotFoundError:
        return False
    return True
