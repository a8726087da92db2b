"""`midstream store inspect DIR`: show the contents of a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midstream.cli.output import print_json, refusals

if TYPE_CHECKING:
    from rich.console import RenderableType

    from midstream.store import Store


def inspect(
    store: Annotated[str, typer.Argument(metavar="DIR", help="A store, or s3://….")],
    request: Annotated[str, typer.Option(metavar="ID", help="Show this request.")] = "",
    plot: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Plot norms by layer and by position, as .svg, .pdf or .png."
        ),
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Show the contents of a store: requests, rows, sites and layers, codecs, models, tags.

    Exit status: 0 success; 2 the store or request does not exist, or a shard is damaged.

    Example: midstream store inspect acts --plot norms.svg
    """
    with refusals(as_json, f"reading {store}"):
        from midstream.store import open_store

        opened = open_store(store)
        plain, table = _request(opened, request) if request else _whole(opened)
        if plot:
            _draw(opened, Path(plot).expanduser(), request)
    if as_json:
        print_json(plain)
        return
    from rich.console import Console

    Console().print(table)
    if plot:
        typer.echo(f"plot written: {plot}")


def _whole(store: Store) -> tuple[Any, RenderableType]:
    from midstream.lab.tools.inspect.overview import Overview
    from midstream.lab.tools.inspect.table import render

    overview = Overview.of(store)
    return overview.to_dict(), render(overview)


def _request(store: Store, request: str) -> tuple[Any, RenderableType]:
    from midstream.lab.tools.inspect.overview import plain_request
    from midstream.lab.tools.inspect.table import render_request

    requests = [stored for stored in store.requests if stored.request == request]
    if not requests:
        store.find(request)  # raises an error that names the existing requests
    return [plain_request(stored) for stored in requests], render_request(requests)


def _draw(store: Store, path: Path, request: str) -> None:
    from midstream.errors import MissingExtraError
    from midstream.lab.tools.inspect.norms import NormSample
    from midstream.validation import check_suffix
    from midstream.viz import Chart

    # Before rows are read.
    check_suffix(path, *Chart.suffixes)
    MissingExtraError.require("matplotlib", "--plot")
    NormSample.of(store, request=request).picture().save(path)
