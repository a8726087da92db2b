"""`midstream doctor MODEL`: examine a model, print what was found, exit with the verdict."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from midstream.tools.doctor.report import Report

# Defaults that a user's own settings override. The engine is in this process, so that what is
# wrong with it is raised here; nothing is compiled.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
DTYPES = ("float32", "bfloat16", "float16")


def doctor(
    model: Annotated[
        str, typer.Argument(help="Folder or name. For a small copy its config.json is enough.")
    ],
    full: Annotated[
        bool,
        typer.Option(
            "--full/--small",
            help="The model itself, or a small random copy made from its configuration.",
        ),
    ] = False,
    layers: Annotated[
        int, typer.Option(min=1, help="Layers of the copy, or more: one of each kind is kept.")
    ] = 3,
    hidden: Annotated[
        int, typer.Option(min=64, help="Width of the copy's stream, a multiple of 64.")
    ] = 64,
    dtype: Annotated[str, typer.Option(help=f"The engine's: {', '.join(DTYPES)}.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the copy's weights and the requests.")] = 0,
    architecture: Annotated[
        str | None, typer.Option(help="Load the copy under this name instead of its own.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write what was found as JSON; - for stdout."),
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show what vLLM logs.")] = False,
) -> None:
    """Check that midstream reads and edits a model as transformers has it.

    Every site of every layer is compared with transformers in float32 and each operation is
    tried. Exit status: 0 all as it should be; 1 something is wrong; 2 refused, not supported, or
    not to be compared.
    """
    if dtype not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if hidden % 64:
        raise typer.BadParameter(f"--hidden: expected a multiple of 64, got {hidden}")
    _check_writable(output)
    from midstream.console import defaults, quiet

    with defaults(ENVIRONMENT), quiet(verbose=verbose) as console:
        from midstream.tools.doctor.examine import Options, examine
        from midstream.tools.doctor.small_config import Size

        size = None if full else Size(layers, hidden)
        report = examine(Options(model, size, dtype, seed, architecture))
        _show(report, console, output)
    raise typer.Exit(report.status)


def _check_writable(output: str | None) -> None:
    """A file that cannot be written is refused before the work, not after it."""
    if output is None or output == "-":
        return
    path = Path(output).expanduser()
    folder = path.parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise typer.BadParameter(f"--json {output}: cannot write a file there; name another")


def _show(report: Report, console: Console, output: str | None) -> None:
    from midstream.tools.doctor.table import render

    text = json.dumps(report.to_dict(), indent=2) + "\n"
    if output == "-":
        console.file.write(text)
        return
    console.print(render(report))
    if output is not None:
        Path(output).expanduser().write_text(text, encoding="utf-8")
