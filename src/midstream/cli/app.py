"""Assembly of the sub-commands: functions in modules of their names; see `midstream.entries`."""

from __future__ import annotations

from typing import Annotated

import typer

from midstream import entries
from midstream.cli import guard
from midstream.cli.command import Command, CommandGroup
from midstream.version import __version__


def make() -> typer.Typer:
    command = typer.Typer(
        name="midstream",
        cls=CommandGroup,
        help="Read and change what a model computes, mid-forward, inside vLLM at full speed.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
    )
    command.callback()(_options)
    store = typer.Typer(
        cls=CommandGroup, no_args_is_help=True, help="Look into stores, and keep them."
    )
    for name in entries.COMMANDS:
        _add(command, name)
    command.add_typer(guard.group(), name="guard")
    command.add_typer(store, name="store")
    for name in entries.STORE_COMMANDS:
        _add(store, name)
        _add(command, name, hidden=True)  # its name before there was a group
    probe = typer.Typer(cls=CommandGroup, no_args_is_help=True, help="Look into files of probes.")
    command.add_typer(probe, name="probe")
    for name in entries.PROBE_COMMANDS:
        _add(probe, name)
    return command


def _add(group: typer.Typer, name: str, hidden: bool = False) -> None:
    module = entries.command(name)
    settings = getattr(module, "CONTEXT", None)
    kind = getattr(module, "CommandClass", Command)
    add = group.command(name, cls=kind, context_settings=settings, hidden=hidden)
    add(getattr(module, name))


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
