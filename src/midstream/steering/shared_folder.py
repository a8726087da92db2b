"""Named vectors, guards and server-wide edits of several processes of a machine, by a folder: a
file for each name and definition, an index with the tiers, and a counter that every process maps
and every read compares. A change holds a lock, which the kernel frees, writes files, replaces the
index by a rename, and raises the counter: it holds in all processes before the call returns.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import mmap
import os
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from midstream.errors import BusyError, ConfigError, StoreError
from midstream.plan.plan import parse_server_wide
from midstream.plan.shape import ModelShape
from midstream.steering.changes import Changes
from midstream.steering.edit_forms import TIERS
from midstream.steering.guard_definition import read_definition
from midstream.steering.guards import Guards, GuardState, GuardVersion
from midstream.steering.registry import NamedEntry, VectorRegistry
from midstream.steering.tiers import Steering, SteeringState

LOCK_SECONDS = 20.0
_POLL_SECONDS = 0.01
_INDEX, _LOCK, _COUNTER = "index.json", "lock", "counter"
_FORMAT = 1


class SharedFolder(Changes):
    """One process's part in a folder: the `Changes` of its registry and tiers. Thread-safe."""

    def __init__(
        self, folder: str, vectors: VectorRegistry, steering: Steering, guards: Guards
    ) -> None:
        """Join a folder of this machine, made if it does not exist. What it has replaces what the
        registries and the tiers have; into a new folder goes what they have.
        """
        self._folder = Path(folder)
        self._vectors, self._steering, self._guards = vectors, steering, guards
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder_stat = self._folder.stat()
        if folder_stat.st_uid != os.geteuid() or folder_stat.st_mode & (
            stat.S_IWGRP | stat.S_IWOTH
        ):
            raise ConfigError(f"{folder}: expected a folder that this user alone can write to")
        self._model = _model_of(vectors.shape)
        self._writing = threading.Lock()  # held by the thread that changes something
        self._loading = threading.Lock()  # held by the thread that reads the index
        self._read = 0  # counter of the state that this process has
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock = os.open(self._folder / _LOCK, flags, 0o600)
        counter = os.open(self._folder / _COUNTER, flags, 0o600)
        try:
            os.ftruncate(counter, 8)
            self._counter = memoryview(mmap.mmap(counter, 8)).cast("Q")
        finally:
            os.close(counter)
        with self._locked():
            if (self._folder / _INDEX).exists():
                self._load_last()
            else:
                self._publish()
        vectors.changes = steering.changes = guards.changes = self

    @property
    def version(self) -> int:
        """Number of changes in the folder, over all processes."""
        return self._counter[0]

    def refresh(self) -> None:
        """Take over what other processes have changed."""
        if self._counter[0] == self._read:
            return
        with self._loading:
            if self._counter[0] != self._read:
                self._load()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the folder's lock; publish what was changed if nothing was raised."""
        with self._locked():
            self._load_last()
            before = self._vectors.entries, self._steering.state, self._guards.state
            yield
            try:
                self._publish()
            except OSError as error:
                self._vectors.entries, self._steering.state, self._guards.state = before
                raise StoreError(
                    "nothing was changed, because the shared folder cannot be written to: "
                    f"{error.strerror}"
                ) from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        end = time.monotonic() + LOCK_SECONDS
        if not self._writing.acquire(timeout=LOCK_SECONDS):
            raise _busy()
        try:
            while True:
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end:
                        raise _busy() from None
                    time.sleep(_POLL_SECONDS)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        finally:
            self._writing.release()

    def _load_last(self) -> None:
        """Take over what the folder has; a killed process may not have raised the counter."""
        with self._loading:
            self._load()
            self._counter[0] = self._read

    def _load(self) -> None:
        tried = None
        while True:
            try:
                index = self._read_json(_INDEX)
                if index["version"] in (self._read, tried):
                    break
                tried = index["version"]
                self._take_over(index)
            except FileNotFoundError:
                # A file of this index was replaced meanwhile, or the index is gone.
                if not (self._folder / _INDEX).exists():
                    raise _damaged("its index is gone") from None
            except ConfigError:
                raise
            except (KeyError, TypeError, ValueError) as error:  # SpecError is a ValueError
                raise _damaged(str(error)) from None
        if index["version"] != self._read:
            raise _damaged("a file that its index names is gone")

    def _take_over(self, index: Mapping[str, Any]) -> None:
        if index["format"] != _FORMAT or index["model"] != self._model:
            raise ConfigError(
                f"{self._folder}: the servers of this shared folder have another model, other "
                "sites or another version of midstream; use a folder of their own"
            )
        known = self._vectors.entries
        entries = {}
        for name, (file, registered) in index["vectors"].items():
            before = known.get(name)
            is_known = before is not None and before.description.registered == registered
            if is_known and before is not None and _file_of(before) == file:
                entries[name] = before
            else:
                entries[name] = self._vectors.entry(name, self._read_json(file), registered)
        tiers = {tier: tuple(map(parse_server_wide, index["steering"][tier])) for tier in TIERS}
        epoch, digest = index["steering"]["epoch"], index["steering"]["digest"]
        guards = self._guards_of(index["guards"])
        self._vectors.entries = entries
        self._guards.state = guards
        self._steering.state = SteeringState(**tiers, epoch=epoch, digest=digest)
        self._read = index["version"]

    def _guards_of(self, index: Mapping[str, Any]) -> GuardState:
        before = self._guards.state.histories.values()
        known = {version.digest: version for versions in before for version in versions}
        histories: dict[str, tuple[GuardVersion, ...]] = {}
        for name, versions in index["histories"].items():
            read = []
            for number, change, when, who, digest in versions:
                version = GuardVersion(number, change, when, who, None)
                if digest and digest not in known:
                    form = self._read_json(_file_of_guard(digest))
                    known[digest] = version.of(read_definition(form).checked_bound())
                if digest:
                    same = known[digest]
                    version = replace(
                        version, definition=same.definition, digest=digest, nbytes=same.nbytes
                    )
                read.append(version)
            histories[name] = tuple(read)
        return GuardState(histories, index["dropped"])

    def _publish(self) -> None:
        version = self._read + 1
        files = {}
        for name, entry in self._vectors.entries.items():
            file = _file_of(entry)
            files[name] = [file, entry.description.registered]
            if not (self._folder / file).exists():
                self._write_json(file, self._vectors.form(name))
        steering = self._steering.state.to_dict()
        guards, definitions = self._write_guards()
        self._write_json(
            _INDEX,
            {
                "format": _FORMAT, "version": version, "model": self._model,
                "vectors": files, "steering": steering, "guards": guards,
            },
        )  # fmt: skip
        self._read = version
        self._counter[0] = version
        used = {file for file, _ in files.values()} | definitions
        for pattern in ("vectors-*", "guard-*"):
            for path in self._folder.glob(pattern):
                if path.name not in used:
                    with suppress(OSError):  # the change is made
                        path.unlink()

    def _write_guards(self) -> tuple[dict[str, Any], set[str]]:
        """Write the definitions that have no file; return the guards' index, and their files."""
        state, files = self._guards.state, set[str]()
        histories: dict[str, list[list[Any]]] = {}
        for name, versions in state.histories.items():
            histories[name] = []
            for version in versions:
                about = version.number, version.change, version.time, version.who, version.digest
                histories[name].append([*about])
                if version.definition is None:
                    continue
                files.add(file := _file_of_guard(version.digest))
                if not (self._folder / file).exists():
                    self._write_json(file, version.definition.to_dict())
        return {"histories": histories, "dropped": state.dropped}, files

    def _read_json(self, name: str) -> Any:
        with open(self._folder / name, encoding="utf-8") as file:
            return json.load(file)

    def _write_json(self, name: str, value: Any) -> None:
        """Write a file, which appears by a rename, over what a killed process left of it."""
        part = self._folder / f"{name}.part"
        private = functools.partial(os.open, mode=0o600)
        with open(part, "w", encoding="utf-8", opener=private) as file:
            json.dump(value, file, allow_nan=False)
        os.replace(part, self._folder / name)


# Messages may reach clients, and name no path of the server.
def _busy() -> BusyError:
    return BusyError("another server changes the shared folder; try again later", 5)


def _damaged(problem: str) -> StoreError:
    return StoreError(f"the shared folder is damaged ({problem}); stop its servers, and remove it")


def _file_of(entry: NamedEntry) -> str:
    """Return the name of an entry's file, which has the digest of its content."""
    return f"vectors-{entry.description.digest}.json"


def _file_of_guard(digest: str) -> str:
    return f"guard-{digest}.json"


def _model_of(shape: ModelShape) -> str:
    """Return a digest of what vectors and edits are checked against."""
    # In an order that is the same in every process.
    taps = sorted([site, layer, shape.size((site, layer))] for site, layer in shape.taps)
    text = json.dumps([shape.num_layers, shape.hidden_size, taps])
    return hashlib.sha256(text.encode()).hexdigest()
