"""`midstream store merge SOURCES… --into DIR`: merge stores, and compact small shards."""

from __future__ import annotations

from typing import Annotated

import typer

from midstream.cli.command import whole
from midstream.cli.output import print_json, refusals


def merge(
    sources: Annotated[list[str], typer.Argument(metavar="DIR…", help="Stores to merge.")],
    into: Annotated[str, typer.Option(metavar="DIR", help="Store to write to.")],
    shard_mb: Annotated[
        int, typer.Option(parser=whole(), metavar="N", help="Size of new shards, in MiB.")
    ] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Merge stores, and compact small shards into large ones.

    If DIR is one of the sources, its own small shards are compacted; the other sources are
    unchanged. Shards that were merged before are skipped, so the command can be repeated, and an
    interrupted merge can be finished by repeating it. Exit status: 0 success; 2 the merge was
    rejected or failed.

    Example: midstream store merge acts-1 acts-2 --into acts
    """
    with refusals(as_json, f"merging into {into}"):
        from midstream.store import merge as merge_stores
        from midstream.store import open_store

        new = merge_stores(sources, into, shard_mb << 20)
        merged = open_store(into)
        requests, shards = len(merged), len(merged.shards)
    if as_json:
        print_json({"status": 0, "new": new, "requests": requests, "shards": shards})
    else:
        typer.echo(f"{into}: {len(new):,} new shards; {requests:,} requests in {shards:,} shards")
