"""Shared output and option parsing of the sub-commands."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from midstream.validation import show

REFUSED = 2
_LOGGER = logging.getLogger(__name__)


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, default=str))


def refuse(problem: str, as_json: bool) -> typer.Exit:
    """Report that the command was rejected, also as JSON if asked; return what to raise."""
    typer.echo(f"error: {problem}", err=True)
    if as_json:
        print_json({"status": REFUSED, "error": problem})
    return typer.Exit(REFUSED)


@contextmanager
def refusals(as_json: bool, work: str = "") -> Iterator[None]:
    """Convert midstream's exceptions and OSError to an error message and exit status 2. Long work
    is named on a terminal, with its time.
    """
    # Lazy: importing the command must not import heavy packages.
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from midstream.errors import MidstreamError

    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    shown = Progress(
        *columns, console=console, transient=True, disable=not (work and console.is_terminal)
    )
    shown.add_task(work, total=None)
    try:
        with shown:
            yield
    except (MidstreamError, OSError) as error:
        problem = str(error)
        if isinstance(error, OSError) and error.filename:
            problem = f"{error.filename}: {error.strerror}"
        raise refuse(problem, as_json) from error


@contextmanager
def failures(verbose: bool) -> Iterator[None]:
    """Convert what vLLM or a library raises into an EngineError of one line."""
    from midstream.errors import EngineError, MidstreamError

    try:
        yield
    except (MidstreamError, OSError):
        raise
    except Exception as error:
        if verbose:
            _LOGGER.exception("it failed")
        text = " ".join(str(error).split())
        raise EngineError(f"{type(error).__name__}: {text}") from error


def read_json_option(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{name}: expected JSON, got {show(text)}: {error}") from None


def read_numbers(name: str, text: str) -> list[int] | None:
    """Parse an option of comma-separated integers; None if it is empty."""
    try:
        return [int(part) for part in text.split(",")] if text else None
    except ValueError:
        raise typer.BadParameter(f"{name}: expected numbers, such as 10,20, got {text!r}") from None


def read_names(text: str) -> list[Any]:
    """Parse an option of comma-separated names; empty if it is."""
    return [name.strip() for name in text.split(",")] if text else []


def read_positions(text: str) -> Any:
    """Parse positions: comma-separated words or numbers, or JSON that `Positions` accepts."""
    try:
        value = json.loads(text)
    except ValueError as error:
        if text.lstrip().startswith(("[", "{")):
            raise typer.BadParameter(f"positions: expected JSON: {error}; got {text}") from None
        return [_number_or_word(part.strip()) for part in text.split(",")]
    if value is None:
        raise typer.BadParameter("positions: expected words, numbers or JSON of them, got null")
    return value


def _number_or_word(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text
