"""`midstream docs`: open the documents of the installed version, which need no network."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from midstream.cli.output import refuse

# Built by scripts/site.sh, and in every released wheel.
SITE = Path(__file__).parents[1] / "site"
# In a clone.
SCRIPT = Path(__file__).parents[3] / "scripts" / "site.sh"
BUILD_SECONDS = 300


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
    network. A clone builds them at the first call. Exit status: 0 success; 2 the page or the
    documents are not there.

    Example: midstream docs quickstart
    """
    if not (SITE / "index.html").is_file():
        _build()
    name = page.removesuffix(".md").removesuffix(".html")
    file = (SITE / f"{name}.html").resolve()
    if SITE.resolve() not in file.parents or not file.is_file():
        names = ", ".join(sorted({html.stem for html in SITE.glob("*.html")} - {"404"}))
        raise refuse(f"page: there is no page {page!r}; there are {names}", as_json=False)
    sys.stdout.write(f"{file.as_uri()}\n")
    if not only_print:
        webbrowser.open(file.as_uri())


def _build() -> None:
    """Build the site, which a clone lacks; takes about 20 seconds."""
    if not SCRIPT.is_file() or importlib.util.find_spec("mkdocs") is None:
        raise refuse(
            "the documents are not built in this installation; in a clone, scripts/setup.sh docs"
            " installs what builds them; docs/*.md are the same pages",
            as_json=False,
        )
    sys.stderr.write("building the documents, once\n")
    command = [str(SCRIPT), "--quiet", "--site-dir", str(SITE)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=BUILD_SECONDS,
        check=False,
    )
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise refuse("scripts/site.sh failed: " + " / ".join(lines[-3:]), as_json=False)
