"""Assembly of the sub-commands: functions in modules of their names; see `midstream.entries`."""

from __future__ import annotations

from typing import Annotated

import typer

from midstream import entries
from midstream.version import __version__


def make() -> typer.Typer:
    command = typer.Typer(
        name="midstream",
        help="Read and change what a model computes, mid-forward, inside vLLM at full speed.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
    )
    command.callback()(_options)
    for name in entries.COMMANDS:
        module = entries.command(name)
        settings = getattr(module, "CONTEXT", None)
        kind = getattr(module, "CommandClass", None)
        command.command(name, cls=kind, context_settings=settings)(getattr(module, name))
    return command


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"midstream {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Read and change what a model computes, mid-forward, inside vLLM at full speed."""


app = make()
