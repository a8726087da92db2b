"""Sinks `npz` and `filesystem`: a folder per request, an npz file per site and layer.

Paths are `root/tag/name/manifest.json` and `root/tag/name/resid_post.12.npz`; without a tag
`root/name/…`; with several completions `root/tag/name/0/…`, `…/1/…`. A folder appears atomically by
a rename, after its files were synced to disk. Existing files are never overwritten. Names that
begin with a dot and end in `.part` are unfinished and may be deleted.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from midstream.errors import SpecError
from midstream.results.receipt import CaptureResult
from midstream.sinks.base import Delivery, Origin, Sink
from midstream.sinks.npz_arrays import arrays_of, described
from midstream.sinks.safe_paths import FOLDER, folder_beneath, is_there

MANIFEST = "manifest.json"
FORMAT = "midstream.npz"
VERSION = 1
_SYNC_THREADS = 8


@dataclass(frozen=True, slots=True)
class _Folder:
    """A written folder that is not yet renamed to its final name.

    Attributes:
        parents: names of the folders between the root and this one.
        part, name: temporary and final name.
        files: names of its files.
        manifest: the manifest, with full paths, as the caller gets it.
    """

    parents: tuple[str, ...]
    part: str
    name: str
    files: tuple[str, ...]
    manifest: dict[str, Any]


class FileSink(Sink):
    """Writes npz files; see the module. Reading them requires only NumPy."""

    group_seconds = 0.01

    def __init__(self, root: str) -> None:
        """Args:
        root: path of a folder; created if missing.
        """
        if not isinstance(root, str) or not root:
            raise ValueError(f"root: expected the path of a folder, got {root!r}")
        self._root = os.path.abspath(os.path.expanduser(root))
        self._origin: Origin | None = None
        self._written: list[_Folder] = []

    def open(self, origin: Origin) -> None:
        self._origin = origin
        os.makedirs(self._root, exist_ok=True)
        if not os.access(self._root, os.W_OK | os.X_OK):
            raise PermissionError(f"{self._root} is not writable")

    def check(self, tag: str, request_id: str) -> None:
        """Reject a tag that is a link or a file, and an id that exists already."""
        try:
            with folder_beneath(self._root, [tag] if tag else [], makes=False) as folder:
                if request_id and is_there(request_id, folder):
                    raise SpecError(
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
        parents = [delivery.tag] if delivery.tag else []
        name = delivery.name
        if delivery.completions > 1:
            parents.append(name)
            name = str(delivery.completion)
        path = os.path.join(self._root, *parents, name)
        part = f".{name}.{uuid.uuid4().hex}.part"
        with folder_beneath(self._root, parents, makes=True) as parent:
            if is_there(name, parent):
                raise FileExistsError(f"{path} exists already")
            os.mkdir(part, dir_fd=parent)
            folder = os.open(part, FOLDER | os.O_NOFOLLOW, dir_fd=parent)
            try:
                manifest = self._fill(delivery, folder)
            except BaseException:
                _remove(part, folder, parent)
                raise
            finally:
                os.close(folder)
        names = (*(one["path"] for one in manifest["files"]), MANIFEST)
        for one in manifest["files"]:
            one["path"] = os.path.join(path, one["path"])
        self._written.append(_Folder(tuple(parents), part, name, names, manifest))

    def flush(self) -> Sequence[CaptureResult]:
        written, self._written = self._written, []
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
        parents = self._sync([(folder.parents, ".") for folder in written])
        return [
            self._result(folder, problem or parents.get(folder.parents, ""))
            for folder, problem in zip(written, moved, strict=True)
        ]

    def _fill(self, delivery: Delivery, folder: int) -> dict[str, Any]:
        """Write the files of a delivery; return its manifest, with file names as paths."""
        activations, origin = delivery.activations, self._origin
        assert origin is not None
        files = []
        for site, layer in activations:
            arrays = arrays_of(activations, site, layer, origin.hidden_size)
            name = f"{site}.{layer}.npz"
            with _new_file(name, folder) as file:
                np.savez(file, **cast("dict[str, Any]", arrays))
            rows = len(arrays["positions"])
            ranks = list(delivery.ranks.get((site, layer), ()))
            files.append(
                {
                    "path": name,
                    "site": site,
                    "layer": layer,
                    "rows": rows,
                    "ranks": ranks,
                    **described(arrays),
                }
            )
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "name": delivery.name,
            "tag": delivery.tag,
            "metadata": dict(delivery.metadata),
            "request_id": delivery.request_id,
            "completion": delivery.completion,
            "completions": delivery.completions,
            "prompt_tokens": delivery.prompt_tokens,
            "generated_tokens": len(delivery.generated_token_ids),
            "finish_reason": delivery.finish_reason,
            "status": delivery.receipt.status,
            "problems": list(delivery.receipt.problems),
            "model": origin.model,
            "revision": origin.revision,
            "hidden_size": origin.hidden_size,
            "dtype": origin.dtype,
            "codec": activations.codec.spec,
            # The residual stream is identical on all ranks: the files are the same in both cases,
            # and differ by the ranks that transferred their rows.
            "return": delivery.return_,
            "vllm": origin.vllm,
            "midstream": origin.midstream,
            "files": files,
        }
        with _new_file(MANIFEST, folder) as file:
            file.write(json.dumps(manifest).encode())
        return manifest

    def _sync(self, files: Sequence[tuple[tuple[str, ...], str]]) -> dict[tuple[str, ...], str]:
        """Sync files to disk, several in parallel, which costs little more than one.

        Args:
            files: (folders from the root, name) of each file.

        Returns:
            The error message of each folder that has one.
        """

        def sync(file: tuple[tuple[str, ...], str]) -> str:
            folders, name = file
            try:
                with folder_beneath(self._root, folders, makes=False) as folder:
                    _sync_file(name, folder)
            except OSError as error:
                return f"{type(error).__name__}: {error}"
            return ""

        distinct = list(dict.fromkeys(files))
        with ThreadPoolExecutor(_SYNC_THREADS) as pool:
            results = zip(distinct, pool.map(sync, distinct), strict=True)
            return {folders: problem for (folders, _), problem in results if problem}

    def _move(self, folder: _Folder) -> str:
        """Rename a folder to its final name; return the error message, or an empty string."""
        try:
            with folder_beneath(self._root, folder.parents, makes=False) as parent:
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


def _new_file(name: str, folder: int) -> Any:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(name, flags, 0o666, dir_fd=folder), "wb")


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
