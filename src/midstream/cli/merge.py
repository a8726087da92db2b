"""`midstream merge SOURCES… --into DIR`: several stores into one, small shards into large ones."""

from __future__ import annotations

from typing import Annotated

import typer

from midstream.cli.output import print_json, refusals


def merge(
    sources: Annotated[list[str], typer.Argument(metavar="DIR…", help="Stores.")],
    into: Annotated[str, typer.Option(metavar="DIR", help="The store that gets all.")],
    shard_mb: Annotated[int, typer.Option(min=1, help="How long a shard gets, in MiB.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Put what is in some stores into one, small shards together as large ones.

    A store that is among its own sources has its small shards merged; the others stay as they
    are. What was merged before is not merged again, so that it can be called over and over; one
    that was interrupted is finished so. Exit status: 0; 2 it was refused, or broke off.
    """
    with refusals(as_json):
        from midstream.store import merge as join
        from midstream.store import open_store

        new = join(sources, into, shard_mb << 20)
        there = open_store(into)
        requests, shards = len(there), len(there.shards)
    if as_json:
        print_json({"status": 0, "new": new, "requests": requests, "shards": shards})
    else:
        typer.echo(f"{into}: {len(new):,} new shards; {requests:,} requests in {shards:,} shards")
