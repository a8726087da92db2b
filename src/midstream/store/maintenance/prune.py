"""Taking out of a store what is not wanted in it."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from midstream.errors import StoreError
from midstream.store.backends.local import LocalFolder, local_folder_of
from midstream.store.format.shard import Shard
from midstream.store.format.shard_builder import ShardBuilder
from midstream.store.maintenance.rewrite import copy_requests, find_replaced, names_for, successor
from midstream.store.maintenance.verify import check_shard, look_at
from midstream.validation import show


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was taken out, or would be.

    Attributes:
        temporaries: files that interrupted writes had left.
        replaced: shards that another one stands for, which an interrupted merge had left.
        damaged: shards that were not right; they are files `NAME.damaged` now.
        requests: (request, child) of each completion.
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
    """Takes out of a store what interrupted work has left, and what else is said.

    A shard that loses some of its requests is written anew, and then removed; readers see one or
    the other at any instant. Writers may go on meanwhile; readers that had the store open see it
    as it is after `refresh`.

    Args:
        root: the store's directory.
        older_than_s: seconds for which nothing was written to a temporary that is removed; a
            writer that is at work writes all the time.
        damaged: whether to set aside shards in which `verify` finds something, as
            `NAME.damaged`: what cannot be read today, or by this version, may be right.
        duplicates: whether to keep of a completion that was stored several times only the one in
            the shard whose name is last, which is the newest.
        requests: ids of requests to remove, all of their completions.
        tags: tags whose requests are removed.

    Raises:
        StoreError: there is no such store, request or tag, another merge or prune is under way, a
            shard is damaged and `damaged` was not asked for, or something cannot be written.
    """
    asked = _Asked(older_than_s, damaged, duplicates, requests, tags)
    folder = local_folder_of(root)
    folder.names()
    with folder.exclusive():
        found = _look(folder, asked)
        folder.sweep(found.pruned.temporaries)
        for name in found.pruned.damaged:
            folder.set_aside(name)
        for name in found.pruned.replaced:
            folder.delete(name)
        for shard, indices in found.gone:
            _rewrite(shard, indices, folder)
    return found.pruned


def find_prunable(
    root: str | os.PathLike[str],
    *,
    older_than_s: float = 3600.0,
    damaged: bool = False,
    duplicates: bool = False,
    requests: Collection[str] = (),
    tags: Collection[str] = (),
) -> Pruned:
    """What `prune` would take out of a store as it is now. Arguments and exceptions are its."""
    folder = local_folder_of(root)
    return _look(folder, _Asked(older_than_s, damaged, duplicates, requests, tags)).pruned


@dataclass(frozen=True, slots=True)
class _Asked:
    """What to take out."""

    older_than_s: float
    damaged: bool
    duplicates: bool
    requests: Collection[str]
    tags: Collection[str]

    def __post_init__(self) -> None:
        for name, given in (("requests", self.requests), ("tags", self.tags)):
            if isinstance(given, str):
                raise StoreError(f"{name}: expected a list of them, got one `str`")


@dataclass(frozen=True, slots=True)
class _Found:
    """What is to be taken out: in words, and the requests by shard and index."""

    pruned: Pruned
    gone: list[tuple[Shard, set[int]]]


def _look(folder: LocalFolder, asked: _Asked) -> _Found:
    names = folder.names()
    bad = [each.shard for each in look_at(folder).findings] if asked.damaged else []
    shards = [Shard(folder, name) for name in names if name not in bad]
    replaced = find_replaced(folder, shards)
    shards = [shard for shard in shards if shard.name not in replaced]
    gone = _unwanted(shards, asked.duplicates, set(asked.requests), set(asked.tags))
    dropped = [
        (shard.lines[index].request, shard.lines[index].child)
        for shard, indices in gone
        for index in sorted(indices)
    ]
    return _Found(
        Pruned(
            tuple(folder.temporaries(asked.older_than_s)),
            tuple(name for name in replaced if name not in bad),
            tuple(bad),
            tuple(dropped),
        ),
        gone,
    )


def _unwanted(
    shards: Sequence[Shard], duplicates: bool, requests: set[str], tags: set[str]
) -> list[tuple[Shard, set[int]]]:
    """Per shard that loses some of its requests, which.

    Raises:
        StoreError: there is no such request or tag.
    """
    lines = [line for shard in shards for line in shard.lines]
    for name, wanted, known in (
        ("request", requests, {line.request for line in lines}),
        ("tag", tags, {line.tag for line in lines}),
    ):
        for missing in sorted(wanted - known):
            raise StoreError(f"{name}: nothing in this store has {show(missing)}")
    newest = {(line.request, line.child): shard for shard in shards for line in shard.lines}
    found = []
    for shard in shards:
        indices = {
            index
            for index, line in enumerate(shard.lines)
            if line.request in requests
            or line.tag in tags
            or (duplicates and newest[line.request, line.child] is not shard)
        }
        if indices:
            found.append((shard, indices))
    return found


def _rewrite(shard: Shard, without: Collection[int], folder: LocalFolder) -> None:
    """Replaces a shard by one that has not these requests, or by none if it has no others."""
    kept = [index for index in range(len(shard.lines)) if index not in without]
    if kept:
        check_shard(shard)
        draft = ShardBuilder(shard.header, names_for([shard]))
        copy_requests(shard, draft, kept)
        folder.put(successor([shard]), draft.pieces())
    folder.delete(shard.name)
