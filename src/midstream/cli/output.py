"""What sub-commands share: how they print, and how they say that something cannot be done."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

REFUSED = 2


def print_json(value: Any) -> None:
    """One value, alone on the standard output."""
    typer.echo(json.dumps(value, indent=2, default=str))


def refuse(problem: str, as_json: bool) -> typer.Exit:
    """Says that nothing was done, and why; what it returns is to be raised.

    Args:
        problem: why.
        as_json: whether the standard output is for machines, who are told there as well.
    """
    typer.echo(f"error: {problem}", err=True)
    if as_json:
        print_json({"status": REFUSED, "error": problem})
    return typer.Exit(REFUSED)


@contextmanager
def refusals(as_json: bool) -> Iterator[None]:
    """What midstream refuses ends the command, by its message."""
    # Not before a sub-command runs: importing the command imports nothing else.
    from midstream.errors import MidstreamError

    try:
        yield
    except (MidstreamError, OSError) as error:
        raise refuse(str(error), as_json) from error


def read_json_option(name: str, text: str) -> Any:
    """An option that is JSON.

    Raises:
        typer.BadParameter: it is not.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(f"{name}: expected JSON: {error}") from None


def read_numbers(name: str, text: str) -> list[int] | None:
    """An option that is numbers with commas between them; None: it was not given.

    Raises:
        typer.BadParameter: something else.
    """
    try:
        return [int(part) for part in text.split(",")] if text else None
    except ValueError:
        raise typer.BadParameter(f"{name}: expected numbers, as 10,20; got {text!r}") from None


def read_positions(text: str) -> Any:
    """Positions as one writes them in a command: words or numbers with commas between them, or
    whatever `Positions` takes, as JSON.

    Raises:
        typer.BadParameter: it begins as JSON does, and is none.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        if text.lstrip().startswith(("[", "{")):
            raise typer.BadParameter(f"positions: expected JSON: {error}; got {text}") from None
        return [_number_or_word(part.strip()) for part in text.split(",")]


def _number_or_word(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text
