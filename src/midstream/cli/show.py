"""`midstream probe show FILE`: what the file of a probe has."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from midstream.cli.output import print_json, refusals


def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A probe, .safetensors.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Show a probe's file: what it reads, and what is known of it. Vectors are not shown.

    Exit status: 0 success; 2 it is no file of a probe.

    Example: midstream probe show guard.safetensors
    """
    with refusals(as_json):
        from midstream.plan import Probe
        from midstream.plan.probe_files.archive import split

        probe = Probe.load(file)
        form, vectors = split(probe.to_dict())
    shapes = {name: list(array.shape) for name, array in vectors.items()}
    info = None if probe.info is None else probe.info.to_dict()
    if as_json:
        print_json({"status": 0, "probe": form, "shapes": shapes, "info": info})
        return
    typer.echo(str(probe))
    for name, value in (info or {}).items():
        if value not in ("", 0, None, {}, ()):
            typer.echo(f"{name}: {_line(value)}")


def _line(value: Any) -> str:
    if not isinstance(value, dict):
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    return ", ".join(f"{name} {_line(part)}" for name, part in value.items())
