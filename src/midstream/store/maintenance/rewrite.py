"""Rewriting of shards: copied requests, names of replaced shards, and leftovers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from midstream.store.backends.base import Folder
from midstream.store.format.entry_rows import IndexedRows
from midstream.store.format.shard import Shard
from midstream.store.format.shard_builder import ShardBuilder
from midstream.store.maintenance.verify import check_shard
from midstream.store.writer import new_name

_TIME = re.compile(r"\d{8}T\d{6}\.\d{6}-")


def copy_requests(shard: Shard, draft: ShardBuilder, requests: Iterable[int]) -> None:
    """Add requests of a shard, by index, to a draft, which references the shard's memory."""
    for index in requests:
        rows = [
            IndexedRows(
                shard.column(run.group, "position", run.start, run.stop),
                shard.column(run.group, "token_id", run.start, run.stop),
                {
                    tap: shard.rows(run.group, tap, run.start, run.stop)
                    for tap in shard.groups[run.group].taps
                },
            )
            for run in shard.runs(index)
        ]
        draft.add(shard.lines[index], shard.metadata_text(index), rows)


def names_for(shards: Iterable[Shard]) -> list[str]:
    return list(
        dict.fromkeys(name for shard in shards for name in (shard.name, *shard.layout.replaces))
    )


def successor(shards: Collection[Shard]) -> str:
    """Return a name for the shard that replaces `shards`; it sorts next to the last of them."""
    last = max(shard.name for shard in shards)
    time = _TIME.match(last)
    name = new_name()
    return time[0] + name[len(time[0]) :] if time else name


def find_replaced(folder: Folder, shards: Iterable[Shard]) -> list[str]:
    """Return the names of replaced shards that an interrupted operation left in a folder."""
    present = set(folder.names())
    leftovers: set[str] = set()
    for shard in shards:
        replaced = present.intersection(shard.layout.replaces)
        if replaced:
            check_shard(shard)
        leftovers |= replaced
    return sorted(leftovers)
