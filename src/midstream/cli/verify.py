"""`midstream store verify DIR`: check a store for damage."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from midstream.cli.output import print_json, refusals


def verify(
    store: Annotated[str, typer.Argument(metavar="DIR", help="A store, or s3://….")],
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Check every byte of every shard, and report damage.

    Exit status: 0 the store is intact; 1 it is damaged; 2 there is no such store.

    Example: midstream store verify acts
    """
    with refusals(as_json, f"checking {store}"):
        from midstream.store import verify as check

        verified = check(store)
    if as_json:
        print_json({"status": int(not verified.ok), **asdict(verified)})
    else:
        typer.echo(str(verified))
    raise typer.Exit(int(not verified.ok))
