"""Taking out of a store what is not wanted in it."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from midstream.errors import StoreError
from midstream.spec.fields import show
from midstream.store.draft import Draft
from midstream.store.folders import LocalFolder, local_folder_of
from midstream.store.rewriting import copy_requests, names_for, remove_replaced, successor
from midstream.store.shard import Shard
from midstream.store.store import Store
from midstream.store.verifying import check_shard, look_at


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was taken out.

    Attributes:
        temporaries: files that interrupted writes had left.
        replaced: shards that another one stands for, which an interrupted merge had left.
        damaged: shards that were not right.
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
        damaged: whether to remove shards in which `verify` finds something.
        duplicates: whether to keep of a completion that was stored several times only the one in
            the shard whose name is last, which is the newest.
        requests: ids of requests to remove, all of their completions.
        tags: tags whose requests are removed.

    Raises:
        StoreError: there is no such store, request or tag, another merge or prune is under way, a
            shard is damaged and `damaged` was not asked for, or something cannot be written.
    """
    for name, given in (("requests", requests), ("tags", tags)):
        if isinstance(given, str):
            raise StoreError(f"{name}: expected a list of them, got one `str`")
    folder = local_folder_of(root)
    folder.names()
    with folder.exclusive():
        temporaries = folder.sweep(older_than_s)
        bad = [each.shard for each in look_at(folder).findings] if damaged else []
        for name in bad:
            folder.delete(name)
        shards = Store(folder).shards
        replaced = remove_replaced(folder, shards)
        gone = _unwanted(shards, duplicates, set(requests), set(tags))
        for shard, indices in gone:
            _rewrite(shard, indices, folder)
    dropped = [
        (shard.lines[index].request, shard.lines[index].child)
        for shard, indices in gone
        for index in sorted(indices)
    ]
    return Pruned(tuple(temporaries), tuple(replaced), tuple(bad), tuple(dropped))


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
        draft = Draft(shard.header, names_for([shard]))
        copy_requests(shard, draft, kept)
        folder.put(successor([shard]), draft.pieces())
    folder.delete(shard.name)
