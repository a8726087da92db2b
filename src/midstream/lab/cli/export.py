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

FORMS = ("npz", "parquet", "arrow", "saelens", "speculators", "specforge", "datasets", "memmap")


def export(
    store: Annotated[str, typer.Argument(metavar="DIR", help="A store, or s3://….")],
    out: Annotated[
        str, typer.Argument(metavar="OUT", help="A file for parquet and arrow, else a folder.")
    ],
    to: Annotated[str, typer.Option(metavar="|".join(FORMS), help="Output format.")],
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
    join: Annotated[
        str, typer.Option(help="Taps in this order, such as resid_post.2,final_norm.")
    ] = "",
    length: Annotated[
        int | None, typer.Option(help="Tokens of a context or, at most, of a completion.")
    ] = None,
    exclude: Annotated[
        str | None, typer.Option(metavar="first", help="Leave out the first token of prompts.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Export rows of a store: npz files, one per site and layer of a request; a Parquet or Arrow
    file; or the rows of each token together, as files of SAELens, speculators, SpecForge, of the
    Hugging Face Hub (datasets) or NumPy (memmap).

    Options with several values select rows that match any of them. Exit status: 0 success; 2 the
    selection is empty or invalid, or the files cannot be written.

    Example: midstream store export acts rows.parquet --to parquet --layer 10,20
    """
    if to not in FORMS:
        raise typer.BadParameter(f"--to: expected one of {', '.join(FORMS)}, got {to!r}")
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
        from midstream.lab.export import export as write
        from midstream.store import open_store

        selection = open_store(store).select(**filters)
        if not len(selection):
            raise refuse("no rows to export: the selection is empty", as_json)
        options: dict[str, Any] = {"join": read_names(join) or None, "exclude": exclude}
        done = write(selection, out, to, length=length, **options)
    left = {"skipped": done.skipped, "cut": done.cut}
    if as_json:
        print_json({"status": 0, "out": out, "rows": done.rows, "written": done.files, **left})
    else:
        what = f"{done.files:,} folders in {out}" if to == "npz" else out
        typer.echo(f"{done.rows:,} rows: {what}")
        for name, number in left.items():
            if number:
                typer.echo(f"{name}: {number:,}")
