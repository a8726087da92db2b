"""`midstream prune DIR`: take out of a store what is not wanted in it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midstream.cli.output import print_json, refusals

if TYPE_CHECKING:
    from midstream.store import Pruned

_MOST_NAMES = 10


def prune(
    store: Annotated[str, typer.Argument(metavar="DIR", help="A store in a directory.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it; without this it is only said what would be done.")
    ] = False,
    request: Annotated[list[str] | None, typer.Option(metavar="ID", help="This request.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="All requests with this tag.")] = None,
    duplicates: Annotated[
        bool, typer.Option("--duplicates", help="All but the newest of what was stored twice.")
    ] = False,
    damaged: Annotated[
        bool, typer.Option("--damaged", help="Shards in which verify finds something.")
    ] = False,
    older_than: Annotated[
        float,
        typer.Option(min=0, help="Files of interrupted writes, untouched for so many seconds."),
    ] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """Take out of a store what interrupted writes have left, and what else is named.

    Nothing is touched without --yes: it is said what would be. Requests and tags may be named
    several times. Exit status: 0; 2 what is named is not there, or it was refused.
    """
    asked: dict[str, Any] = {
        "older_than_s": older_than,
        "damaged": damaged,
        "duplicates": duplicates,
        "requests": request or (),
        "tags": tag or (),
    }
    with refusals(as_json):
        from midstream import store as stores

        found = (stores.prune if yes else stores.find_prunable)(store, **asked)
    if as_json:
        print_json({"status": 0, "done": yes, **asdict(found)})
    else:
        typer.echo("\n".join(describe(found, yes)))


def describe(found: Pruned, done: bool) -> list[str]:
    """What was taken out, or would be, in lines."""
    parts = {
        "files that interrupted writes left": found.temporaries,
        "shards that another one stands for": found.replaced,
        "damaged shards": found.damaged,
        "requests": [f"{name} ({child})" if child else name for name, child in found.requests],
    }
    lines = []
    for what, names in parts.items():
        if names:
            shown = ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
            lines.append(f"{len(names):,} {what}: {shown}")
    if not lines:
        return ["there is nothing to remove"]
    return ["removed:" if done else "would be removed, with --yes:", *lines]
