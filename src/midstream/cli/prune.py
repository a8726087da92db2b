"""`midstream store prune DIR`: delete unwanted files and requests of a store."""

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
        bool, typer.Option("--yes", help="Delete; without it, only report what would be deleted.")
    ] = False,
    request: Annotated[list[str] | None, typer.Option(metavar="ID", help="This request.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="All requests with this tag.")] = None,
    duplicates: Annotated[
        bool, typer.Option("--duplicates", help="All but the newest copy of each request.")
    ] = False,
    damaged: Annotated[bool, typer.Option("--damaged", help="Shards that fail verify.")] = False,
    older_than: Annotated[
        float,
        typer.Option(min=0, help="Files of interrupted writes, unchanged for this many seconds."),
    ] = 3600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Delete leftovers of interrupted writes, and optionally requests by id or tag.

    Nothing is deleted without --yes; the command only reports what it would delete. Requests and
    tags can be given several times. Exit status: 0 success; 2 a request or tag does not exist, or
    the store was rejected.

    Example: midstream store prune acts --duplicates --yes
    """
    arguments: dict[str, Any] = {
        "older_than_s": older_than,
        "damaged": damaged,
        "duplicates": duplicates,
        "requests": request or (),
        "tags": tag or (),
    }
    with refusals(as_json, f"pruning {store}" if yes else f"looking through {store}"):
        from midstream import store as stores

        pruned = (stores.prune if yes else stores.find_prunable)(store, **arguments)
    if as_json:
        print_json({"status": 0, "done": yes, **asdict(pruned)})
    else:
        typer.echo("\n".join(describe(pruned, yes)))


def describe(pruned: Pruned, done: bool) -> list[str]:
    parts = {
        "files of interrupted writes": pruned.temporaries,
        "shards replaced by a merged shard": pruned.replaced,
        "damaged shards": pruned.damaged,
        "requests": [f"{name} ({child})" if child else name for name, child in pruned.requests],
    }
    lines = []
    for what, names in parts.items():
        if names:
            shown = ", ".join(names[:_MOST_NAMES]) + (", …" if len(names) > _MOST_NAMES else "")
            lines.append(f"{len(names):,} {what}: {shown}")
    if not lines:
        return ["nothing to remove"]
    return ["removed:" if done else "would be removed, with --yes:", *lines]
