"""Removal of leftovers, damaged shards, duplicates and chosen requests from a store."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

from midstream.errors import StoreError
from midstream.store.backends.base import check_store
from midstream.store.backends.local import LocalFolder, local_folder_of
from midstream.store.format.shard import Shard
from midstream.store.format.shard_builder import ShardBuilder
from midstream.store.maintenance.rewrite import copy_requests, find_replaced, names_for, successor
from midstream.store.maintenance.verify import check_shard, verify_folder
from midstream.validation import kind, show


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` removed, or what `find_prunable` found to remove.

    Attributes:
        temporaries: files left by interrupted writes.
        replaced: shards left by an interrupted merge, which another shard replaces.
        damaged: damaged shards, which `prune` renames to `NAME.damaged`.
        requests: (request, child) of each removed completion.
    """

    temporaries: tuple[str, ...]
    replaced: tuple[str, ...]
    damaged: tuple[str, ...]
    requests: tuple[tuple[str, int], ...]


def prune(
    root: str | os.PathLike[str],
    *,
    older_than_s: float = 3600.0,
    damaged: bool = False,
    duplicates: bool = False,
    requests: Collection[str] = (),
    tags: Collection[str] = (),
) -> Pruned:
    """Remove leftovers of interrupted operations, and optionally requests and damaged shards.

    A shard that loses some of its requests is rewritten before the old one is deleted, and readers
    see one of the two at any time. Writers may continue meanwhile. Readers that have the store
    open see the changes after `refresh`.

    Args:
        root: the store's directory.
        older_than_s: minimum age of removed temporaries, in seconds since their last write; an
            active writer writes continuously.
        damaged: whether to rename shards with findings of `verify` to `NAME.damaged`. They are
            not deleted, because a shard that is unreadable now or by this version may be intact.
        duplicates: whether to remove all but the newest copy of completions that were stored
            several times. The newest is in the shard whose name sorts last.
        requests: ids of requests to remove, with all completions.
        tags: tags whose requests are removed.

    Raises:
        StoreError: an argument has a wrong type, the store, a request or a tag does not exist,
            another merge or prune is running, a shard is damaged and `damaged` is false, or a file
            cannot be written.
    """
    options = _Options(older_than_s, damaged, duplicates, requests, tags)
    folder = check_store(local_folder_of(root))
    with folder.exclusive():
        pruned, unwanted = _find(folder, options)
        folder.sweep(pruned.temporaries)
        for name in pruned.damaged:
            folder.set_aside(name)
        for name in pruned.replaced:
            folder.delete(name)
        for shard, indices in unwanted:
            _rewrite(shard, indices, folder)
    return pruned


def find_prunable(
    root: str | os.PathLike[str],
    *,
    older_than_s: float = 3600.0,
    damaged: bool = False,
    duplicates: bool = False,
    requests: Collection[str] = (),
    tags: Collection[str] = (),
) -> Pruned:
    """Return what `prune` would remove now. Arguments and exceptions are those of `prune`."""
    folder = check_store(local_folder_of(root))
    return _find(folder, _Options(older_than_s, damaged, duplicates, requests, tags))[0]


@dataclass(frozen=True, slots=True)
class _Options:
    older_than_s: float
    damaged: bool
    duplicates: bool
    requests: Collection[str]
    tags: Collection[str]

    def __post_init__(self) -> None:
        for name, values in (("requests", self.requests), ("tags", self.tags)):
            if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Collection):
                raise StoreError(f"{name}: expected a list, got {kind(values)}")
            for index, value in enumerate(values):
                if not isinstance(value, str):
                    raise StoreError(f"{name}[{index}]: expected `str`, got {kind(value)}")
        for name, flag in (("damaged", self.damaged), ("duplicates", self.duplicates)):
            if not isinstance(flag, bool):
                raise StoreError(f"{name}: expected `bool`, got {kind(flag)}")
        age = self.older_than_s
        if isinstance(age, bool) or not isinstance(age, Real):
            raise StoreError(f"older_than_s: expected a number of seconds, got {kind(age)}")
        if math.isnan(age):
            raise StoreError("older_than_s: expected a number of seconds, got nan")


def _find(folder: LocalFolder, options: _Options) -> tuple[Pruned, list[tuple[Shard, set[int]]]]:
    """Return what to remove: the summary, and the requests by shard and index."""
    names = folder.names()
    bad = [finding.shard for finding in verify_folder(folder).findings] if options.damaged else []
    shards = [Shard(folder, name) for name in names if name not in bad]
    replaced = find_replaced(folder, shards)
    shards = [shard for shard in shards if shard.name not in replaced]
    unwanted = _unwanted(shards, options.duplicates, set(options.requests), set(options.tags))
    dropped = [
        (shard.lines[index].request, shard.lines[index].child)
        for shard, indices in unwanted
        for index in sorted(indices)
    ]
    leftovers = tuple(folder.temporaries(options.older_than_s))
    intact = tuple(name for name in replaced if name not in bad)
    return Pruned(leftovers, intact, tuple(bad), tuple(dropped)), unwanted


def _unwanted(
    shards: Sequence[Shard], duplicates: bool, requests: set[str], tags: set[str]
) -> list[tuple[Shard, set[int]]]:
    """Return the indices of requests to remove, for each shard that has any."""
    lines = [line for shard in shards for line in shard.lines]
    for name, wanted, known in (
        ("request", requests, {line.request for line in lines}),
        ("tag", tags, {line.tag for line in lines}),
    ):
        for missing in sorted(wanted - known):
            raise StoreError(f"{name}: no rows in this store have {show(missing)}")
    newest = {(line.request, line.child): shard for shard in shards for line in shard.lines}
    unwanted = []
    for shard in shards:
        indices = {
            index
            for index, line in enumerate(shard.lines)
            if line.request in requests
            or line.tag in tags
            or (duplicates and newest[line.request, line.child] is not shard)
        }
        if indices:
            unwanted.append((shard, indices))
    return unwanted


def _rewrite(shard: Shard, without: Collection[int], folder: LocalFolder) -> None:
    """Replace a shard by one without some requests, or delete it if no others remain."""
    kept = [index for index in range(len(shard.lines)) if index not in without]
    if kept:
        check_shard(shard)
        draft = ShardBuilder(shard.header, names_for([shard]))
        copy_requests(shard, draft, kept)
        folder.put(successor([shard]), draft.pieces())
    folder.delete(shard.name)
