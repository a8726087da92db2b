"""`midstream probe diff A B`: what differs between the files of two probes."""

from __future__ import annotations

from typing import Annotated

import typer

from midstream.cli.output import print_json, refusals


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A probe, .safetensors.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Compare two probes: fields that differ, and cosines of their vectors.

    Exit status: 0 they are equal, with what is known of them; 1 they differ; 2 one is no file of a
    probe.

    Example: midstream probe diff guard.safetensors guard-2.safetensors
    """
    with refusals(as_json):
        from midstream.plan import Probe

        difference = Probe.load(first).diff(Probe.load(second))
    if as_json:
        print_json({"status": int(bool(difference)), **difference.to_dict()})
    else:
        typer.echo(str(difference))
    raise typer.Exit(int(bool(difference)))
