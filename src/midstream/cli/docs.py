"""`midstream docs`: open the documents of the installed version, which need no network."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from midstream.cli.output import refuse

# Built by scripts/site.sh, and in every released wheel.
SITE = Path(__file__).parents[1] / "site"


def docs(
    page: Annotated[
        str, typer.Argument(help="Page to open, such as quickstart or api/edits.")
    ] = "index",
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the address, and open no browser.")
    ] = False,
) -> None:
    """Open the documents of this version in a browser.

    They are files of the installed package: guides, the API reference and a search, without a
    network. Exit status: 0 success; 2 the page or the documents are not there.

    Example: midstream docs quickstart
    """
    if not (SITE / "index.html").is_file():
        raise refuse(
            "the documents are not built in this installation, as in a clone; read docs/*.md there,"
            ' or build them: pip install "mkdocs-material>=9.6" "mkdocstrings-python>=1.16"'
            " nbformat, then scripts/site.sh",
            as_json=False,
        )
    name = page.removesuffix(".md").removesuffix(".html")
    file = (SITE / f"{name}.html").resolve()
    if SITE.resolve() not in file.parents or not file.is_file():
        names = ", ".join(sorted({html.stem for html in SITE.glob("*.html")} - {"404"}))
        raise refuse(f"page: there is no page {page!r}; there are {names}", as_json=False)
    sys.stdout.write(f"{file.as_uri()}\n")
    if not only_print:
        webbrowser.open(file.as_uri())
