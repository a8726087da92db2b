"""Merging of stores, and compaction of small shards."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from midstream.errors import StoreError
from midstream.sites import Tap
from midstream.store.backends.base import Folder, check_store
from midstream.store.backends.local import LocalFolder, folder_of, local_folder_of
from midstream.store.format.entry import Header
from midstream.store.format.layout import MAX_HEADER, MAX_REQUESTS
from midstream.store.format.shard import Shard
from midstream.store.format.shard_builder import ShardBuilder
from midstream.store.maintenance.rewrite import copy_requests, find_replaced, names_for, successor
from midstream.store.maintenance.verify import check_shard
from midstream.store.store import Store
from midstream.store.writer import SHARD_BYTES, check_shard_bytes
from midstream.validation import kind

Path = str | os.PathLike[str]

# The header lists the shards that a shard replaces and needs space for its tensors, too.
_MAX_NAMES = MAX_HEADER // 1024
# Each source shard is a file that stays open until its rows are written.
_MAX_SHARDS = 256


@dataclass(slots=True)
class _Pack:
    shards: list[Shard] = field(default_factory=list)
    known: set[tuple[str, int]] = field(default_factory=set)
    widths: dict[Tap, int] = field(default_factory=dict)  # of every tap in the shards
    nbytes: int = 0
    head_bytes: int = 0
    lines_bytes: int = 0

    def fits(self, shard: Shard, shard_bytes: int) -> bool:
        return (
            self.nbytes + shard.size <= shard_bytes
            and len(self.shards) < _MAX_SHARDS
            and len(names_for([*self.shards, shard])) <= _MAX_NAMES
            and self.head_bytes + shard.head_bytes <= MAX_HEADER // 2
            and self.lines_bytes + shard.layout.requests_bytes <= MAX_REQUESTS // 2
            and self.known.isdisjoint((line.request, line.child) for line in shard.lines)
            and all(self.widths.get(tap, width) == width for tap, width in _widths(shard).items())
        )

    def add(self, shard: Shard) -> None:
        self.shards.append(shard)
        self.known.update((line.request, line.child) for line in shard.lines)
        self.widths |= _widths(shard)
        self.nbytes += shard.size
        self.head_bytes += shard.head_bytes
        self.lines_bytes += shard.layout.requests_bytes


def _widths(shard: Shard) -> dict[Tap, int]:
    return {tap: shard.header.width(tap) for group in shard.groups for tap in group.taps}


def merge(sources: Path | Sequence[Path], into: Path, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Merge stores into one and compact small shards into large ones.

    If `into` is among the sources, its own small shards are compacted. Other sources are not
    changed and can be merged again after they have grown: shards that were merged before are
    skipped.

    Every new shard lists the shards that it replaces, and readers skip those. Each request is
    therefore visible exactly once, even if the merge is interrupted. Calling it again completes an
    interrupted merge.

    Args:
        sources: one store or several.
        into: directory of the target store; created if missing.
        shard_bytes: target length of a shard.

    Returns:
        The names of the shards that are new in `into`.

    Raises:
        StoreError: an argument is malformed, a store does not exist, another merge or prune is
            running, a shard is damaged (it is not merged; see `verify` and `prune`), or a shard
            cannot be written.
    """
    check_shard_bytes(shard_bytes)
    folders = [folder_of(source) for source in _listed(sources)]
    for folder in folders:
        check_store(folder)  # raises if the folder does not exist, before the target is created
    target = local_folder_of(into)
    target.make()
    with target.exclusive():
        store = Store(target)
        _remove_replaced(target, store)
        contents = _Contents(store.shards)
        source_shards = [
            shard
            for folder in folders
            if not _is_same(folder, target)
            for shard in Store(folder).shards
            if contents.add(shard)
        ]
        # A source may have a shard that one of a later source was made from.
        parts = {name for shard in source_shards for name in shard.layout.replaces}
        source_shards = [shard for shard in source_shards if shard.name not in parts]
        new = [_copy(shard, target) for shard in source_shards if shard.size > shard_bytes // 2]
        if any(_is_same(folder, target) for folder in folders):
            replaced = set(names_for(source_shards))
            source_shards += [shard for shard in store.shards if shard.name not in replaced]
        small = [shard for shard in source_shards if shard.size <= shard_bytes // 2]
        for shards in _packs(small, shard_bytes):
            new.extend(_join(shards, target))
        _remove_replaced(target, Store(target))
    return new


def _remove_replaced(target: LocalFolder, store: Store) -> None:
    for name in find_replaced(target, store.shards):
        target.delete(name)


def _listed(sources: Path | Sequence[Path]) -> Sequence[Path]:
    if isinstance(sources, (str, os.PathLike)):
        return [sources]
    if not isinstance(sources, Iterable):
        raise StoreError(f"sources: expected a path or a list of them, got {kind(sources)}")
    return list(sources)


class _Contents:
    """Names of the shards in a store, including the shards that they replace."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._holders = {name: shard for shard in shards for name in names_for([shard])}

    def add(self, shard: Shard) -> bool:
        """Add a shard of another store if its requests are missing; return whether it was added."""
        names = names_for([shard])
        present = [self._holders[name] for name in names if name in self._holders]
        holders = {holder.name: holder for holder in present}
        if shard.name in self._holders:
            return False
        ids = _ids([shard])
        if holders and not ids <= _ids(holders.values()):
            # It may replace them if it contains all of their requests.
            others = set(names_for(holders.values())) - set(names)
            if others or not _ids(holders.values()) <= ids:
                raise StoreError(
                    f"{shard.path}: only some of its requests were merged into "
                    f"{next(iter(holders))} before; merge all sources into a new store"
                )
        elif holders:
            return False
        self._holders.update(dict.fromkeys(names, shard))
        return True


def _ids(shards: Iterable[Shard]) -> set[tuple[str, int]]:
    return {(line.request, line.child) for shard in shards for line in shard.lines}


def _is_same(folder: Folder, target: LocalFolder) -> bool:
    if not isinstance(folder, LocalFolder) or not os.path.exists(folder.root):
        return False
    return os.path.samefile(folder.root, target.root)


def _packs(shards: Iterable[Shard], shard_bytes: int) -> list[list[Shard]]:
    """Group shards into packs that are merged into one shard each, in the order of names."""
    packs: list[_Pack] = []
    open_packs: dict[Header, _Pack] = {}
    for shard in sorted(shards, key=lambda shard: shard.name):
        # A shard's header has the widths of its own taps only.
        header = replace(shard.header, widths=())
        pack = open_packs.get(header)
        if pack is None or not pack.fits(shard, shard_bytes):
            pack = open_packs[header] = _Pack()
            packs.append(pack)
        pack.add(shard)
    return [pack.shards for pack in packs]


def _join(shards: list[Shard], target: LocalFolder) -> list[str]:
    """Merge shards into one, and delete those that are in the target; return new names."""
    if len(shards) == 1:
        # Rewriting a single shard of the target gains nothing.
        return [] if shards[0].name in target.names() else [_copy(shards[0], target)]
    widths = tuple(tap_width for shard in shards for tap_width in shard.header.widths)
    draft = ShardBuilder(replace(shards[0].header, widths=widths), names_for(shards))
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
