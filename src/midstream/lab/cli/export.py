"""`midstream store export DIR OUT --to KIND`: convert rows of a store to other formats."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from midstream.cli.output import (
    print_json,
    read_names,
    read_numbers,
    read_positions,
    refusals,
    refuse,
)

KINDS = ("npz", "parquet", "arrow")


def export(
    store: Annotated[str, typer.Argument(metavar="DIR", help="A store, or s3://….")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="A folder for npz, a file for the others.")
    ],
    to: Annotated[str, typer.Option(metavar="|".join(KINDS), help="Output format.")],
    site: Annotated[
        list[str] | None,
        typer.Option("--site", "--sites", help="Only these sites, such as resid_post,mlp_out."),
    ] = None,
    layer: Annotated[
        str, typer.Option("--layer", "--layers", help="Only these layers, such as 10,20.")
    ] = "",
    request: Annotated[
        list[str] | None, typer.Option(metavar="ID", help="Only this request.")
    ] = None,
    child: Annotated[str, typer.Option(help="Only these completions, such as 0,1.")] = "",
    tag: Annotated[list[str] | None, typer.Option(help="Only requests with this tag.")] = None,
    position: Annotated[
        str, typer.Option(help="Only these positions, such as last_prompt, 0,-1, or JSON.")
    ] = "",
    token: Annotated[str, typer.Option(help="Only tokens with these ids, such as 5,7.")] = "",
    model: Annotated[str, typer.Option(help="Only rows of this model.")] = "",
    codec: Annotated[str, typer.Option(help="Only rows of this codec.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Export rows of a store as npz files, one per site and layer of a request, or as a Parquet or
    Arrow file.

    Options with several values select rows that match any of them. Exit status: 0 success; 2 the
    selection is empty or invalid, or the files cannot be written.

    Example: midstream store export acts rows.parquet --to parquet --layer 10,20
    """
    if to not in KINDS:
        raise typer.BadParameter(f"--to: expected one of {', '.join(KINDS)}, got {to!r}")
    filters: dict[str, Any] = {
        "site": read_names(",".join(site or ())) or None,
        "layer": read_numbers("--layer", layer),
        "request": request or None,
        "child": read_numbers("--child", child),
        "tag": tag or None,
        "position": read_positions(position) if position else None,
        "token": read_numbers("--token", token),
        "model": model or None,
        "codec": codec or None,
    }
    with refusals(as_json, f"exporting to {out}"):
        from midstream.lab.export import export_arrow, export_npz, export_parquet
        from midstream.store import open_store

        write: Any = {"npz": export_npz, "parquet": export_parquet, "arrow": export_arrow}[to]
        selection = open_store(store).select(**filters)
        if not len(selection):
            raise refuse("no rows to export: the selection is empty", as_json)
        written = write(selection, out)
    files = len(written) if isinstance(written, list) else 1
    if as_json:
        print_json({"status": 0, "out": out, "rows": len(selection), "written": files})
    else:
        what = f"{files:,} folders in {out}" if to == "npz" else out
        typer.echo(f"{len(selection):,} rows: {what}")
