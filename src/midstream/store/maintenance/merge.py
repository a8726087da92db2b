"""Many small shards into few large ones, and several stores into one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from midstream.errors import StoreError
from midstream.store.backends.local import Folder, LocalFolder, folder_of, local_folder_of
from midstream.store.format.entry import Header
from midstream.store.format.layout import MAX_HEADER, MAX_REQUESTS
from midstream.store.format.shard import Shard
from midstream.store.format.shard_builder import ShardBuilder
from midstream.store.maintenance.rewrite import copy_requests, find_replaced, names_for, successor
from midstream.store.maintenance.verify import check_shard
from midstream.store.store import Store
from midstream.store.writer import SHARD_BYTES

Path = str | os.PathLike[str]

# What a shard stands for is in its header: with more names it would leave no room for tensors.
_MOST_NAMES = MAX_HEADER // 1024
# Each is a file that is held open until their rows are written.
_MOST_SHARDS = 256


@dataclass(slots=True)
class _Pack:
    """Shards that become one."""

    shards: list[Shard] = field(default_factory=list)
    known: set[tuple[str, int]] = field(default_factory=set)
    nbytes: int = 0
    head_bytes: int = 0
    lines_bytes: int = 0

    def takes(self, shard: Shard, shard_bytes: int) -> bool:
        """Whether there is room for one more."""
        return (
            self.nbytes + shard.size <= shard_bytes
            and len(self.shards) < _MOST_SHARDS
            and len(names_for([*self.shards, shard])) <= _MOST_NAMES
            and self.head_bytes + shard.head_bytes <= MAX_HEADER // 2
            and self.lines_bytes + shard.layout.requests_bytes <= MAX_REQUESTS // 2
            and self.known.isdisjoint((line.request, line.child) for line in shard.lines)
        )

    def add(self, shard: Shard) -> None:
        self.shards.append(shard)
        self.known.update((line.request, line.child) for line in shard.lines)
        self.nbytes += shard.size
        self.head_bytes += shard.head_bytes
        self.lines_bytes += shard.layout.requests_bytes


def merge(sources: Path | Sequence[Path], into: Path, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Puts what is in some stores into one, small shards together as large ones.

    A store that is among its own sources has its small shards merged. Other sources stay as they
    are, and may be merged again when there is more in them: what was merged is passed over.

    Every new shard says which shards it stands for, and readers pass those over: at whichever
    instant this is stopped, each request is there once. To call it again finishes what it began.

    Args:
        sources: one store or several.
        into: the directory of the store that gets all; made where there is none.
        shard_bytes: how long a shard gets.

    Returns:
        The names of the shards that are new in `into`.

    Raises:
        StoreError: there is no such store, another merge or prune of it is under way, a shard is
            damaged (nothing is made of it; see `verify` and `prune`), or one cannot be written.
    """
    folders = [folder_of(each) for each in _listed(sources)]
    for folder in folders:
        folder.names()  # raises where there is none, before another one is made
    target = local_folder_of(into)
    target.make()
    with target.exclusive():
        store = Store(target)
        _remove_replaced(target, store)
        there = _Contents(store.shards)
        found = [
            shard
            for folder in folders
            if not _is_same(folder, target)
            for shard in Store(folder).shards
            if there.takes(shard)
        ]
        new = [_copy(shard, target) for shard in found if shard.size > shard_bytes // 2]
        if any(_is_same(folder, target) for folder in folders):
            replaced = set(names_for(found))
            found += [shard for shard in store.shards if shard.name not in replaced]
        small = [shard for shard in found if shard.size <= shard_bytes // 2]
        for shards in _packs(small, shard_bytes):
            new.extend(_join(shards, target))
        _remove_replaced(target, Store(target))
    return new


def _remove_replaced(target: LocalFolder, store: Store) -> None:
    for name in find_replaced(target, store.shards):
        target.delete(name)


def _listed(sources: Path | Sequence[Path]) -> Sequence[Path]:
    return [sources] if isinstance(sources, (str, os.PathLike)) else sources


class _Contents:
    """What the shards of a store hold, shards that were merged into them included."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._holders = {name: shard for shard in shards for name in names_for([shard])}

    def takes(self, shard: Shard) -> bool:
        """Whether a shard of another store is to be taken in; then it counts as held.

        Raises:
            StoreError: a part of it is here, merged with what it does not have.
        """
        names = names_for([shard])
        holders = {self._holders[name].name: self._holders[name] for name in names if name in self}
        if shard.name in self._holders:
            return False
        ids = _ids([shard])
        if holders and not ids <= _ids(holders.values()):
            # It may take their place, if it has all that they have.
            others = set(names_for(holders.values())) - set(names)
            if others or not _ids(holders.values()) <= ids:
                raise StoreError(
                    f"{shard.path}: a part of it was merged into {next(iter(holders))} before, "
                    "another was not; merge all into a new store"
                )
        elif holders:
            return False
        self._holders.update(dict.fromkeys(names, shard))
        return True

    def __contains__(self, name: str) -> bool:
        return name in self._holders


def _ids(shards: Iterable[Shard]) -> set[tuple[str, int]]:
    return {(line.request, line.child) for shard in shards for line in shard.lines}


def _is_same(folder: Folder, target: LocalFolder) -> bool:
    if not isinstance(folder, LocalFolder) or not os.path.exists(folder.root):
        return False
    return os.path.samefile(folder.root, target.root)


def _packs(shards: Iterable[Shard], shard_bytes: int) -> list[list[Shard]]:
    """Shards that become one each, in the order of their names."""
    packs: list[_Pack] = []
    open_packs: dict[Header, _Pack] = {}
    for shard in sorted(shards, key=lambda one: one.name):
        pack = open_packs.get(shard.header)
        if pack is None or not pack.takes(shard, shard_bytes):
            pack = open_packs[shard.header] = _Pack()
            packs.append(pack)
        pack.add(shard)
    return [pack.shards for pack in packs]


def _join(shards: list[Shard], target: LocalFolder) -> list[str]:
    """Makes one shard of several, and removes those of them that are in the same store."""
    if len(shards) == 1:
        # Nothing is gained where it is one of the target's own.
        return [] if shards[0].name in target.names() else [_copy(shards[0], target)]
    draft = ShardBuilder(shards[0].header, names_for(shards))
    for shard in shards:
        check_shard(shard)
        copy_requests(shard, draft, range(len(shard.lines)))
    name = successor(shards)
    target.put(name, draft.pieces())
    for shard in shards:
        target.delete(shard.name)
    return [name]


def _copy(shard: Shard, target: LocalFolder) -> str:
    check_shard(shard)
    target.put(shard.name, shard.pieces())
    return shard.name
