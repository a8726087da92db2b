"""`midstream verify DIR`: whether a store is what was written."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from midstream.cli.output import print_json, refusals


def verify(
    store: Annotated[str, typer.Argument(metavar="DIR", help="A store, or s3://….")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Look at every byte of every shard, and say what is wrong.

    Exit status: 0 nothing is; 1 something is; 2 there is no such store.
    """
    with refusals(as_json):
        from midstream.store import verify as look

        found = look(store)
    if as_json:
        print_json({"status": int(not found.ok), **asdict(found)})
    else:
        typer.echo(str(found))
    raise typer.Exit(int(not found.ok))
