"""`midstream doctor MODEL`: check a model, print the findings, and exit with the verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midstream.lab.cli.capture import check_writable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from midstream.lab.tools.doctor.report import Report

# Defaults; variables that the user has set take precedence. The engine runs in this process, so
# that its exceptions are raised here. Nothing is compiled.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
DTYPES = ("float32", "bfloat16", "float16")
# Of --layers, --hidden, --dtype, --seed and --architecture.
_DEFAULTS = (3, 64, "float32", 0, None)


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Folder or name; for a small copy, config.json is enough; also --model.",
        ),
    ] = None,
    env: Annotated[
        bool,
        typer.Option("--env", help="Check the installation instead of a model, and start none."),
    ] = False,
    full: Annotated[
        bool,
        typer.Option(
            "--full/--small",
            help="Check the model itself, or a small random copy made from its configuration.",
        ),
    ] = False,
    layers: Annotated[
        int, typer.Option(min=1, help="Minimum layers of the copy; it has one of each kind.")
    ] = 3,
    hidden: Annotated[
        int, typer.Option(min=64, help="Hidden size of the copy, a multiple of 64.")
    ] = 64,
    dtype: Annotated[
        str, typer.Option(help=f"Dtype of the engine: {', '.join(DTYPES)}.")
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the copy's weights and the requests.")] = 0,
    architecture: Annotated[
        str | None, typer.Option(help="Architecture name to load the copy under.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the findings as JSON; - for stdout."),
    ] = None,
    verbose: Annotated[bool, typer.Option(help="Show vLLM's log.")] = False,
) -> None:
    """Check midstream's reads and edits of a model, or the installation.

    Compares every site of every layer with transformers in float32, or with hooks on vLLM's own
    modules where transformers proves nothing, and tries each operation. Exit
    status: 0 everything matches; 1 something differs; 2 the check was rejected, or the model is
    unsupported or cannot be compared. With --env: versions, GPUs, extras, vLLM's seams and what is
    odd; 0 no problems, 1 some.

    Example: midstream doctor --env
    """
    if env == (model is not None):
        raise typer.BadParameter("expected either a MODEL or --env")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if env and (full, layers, hidden, dtype, seed, architecture) != (False, *_DEFAULTS):
        raise typer.BadParameter("with --env no model is checked; omit the options for one")
    if full and (layers, hidden, architecture) != (_DEFAULTS[0], _DEFAULTS[1], None):
        raise typer.BadParameter(
            "--layers, --hidden and --architecture are of a small copy; omit them with --full"
        )
    if hidden % 64:
        raise typer.BadParameter(f"--hidden: expected a multiple of 64, got {hidden}")
    if output not in (None, "-"):
        check_writable(output, "--json ")
    from midstream.console import defaults, quiet

    if model is None:
        from midstream.lab.tools.doctor.environment import inspect_environment
        from midstream.lab.tools.doctor.table import render_environment

        with defaults(ENVIRONMENT), quiet(verbose=verbose) as console:
            environment = inspect_environment()
            _write(environment.to_dict(), render_environment(environment), console, output)
        raise typer.Exit(1 if environment.problems else 0)
    with defaults(ENVIRONMENT), quiet(verbose=verbose) as console:
        from midstream.lab.tools.doctor.examine import Options, examine
        from midstream.lab.tools.doctor.small_config import Size

        size = None if full else Size(layers, hidden)
        report = examine(Options(model, size, dtype, seed, architecture))
        _show(report, console, output)
    raise typer.Exit(report.status)


def _show(report: Report, console: Console, output: str | None) -> None:
    from midstream.lab.tools.doctor.table import render

    _write(report.to_dict(), render(report), console, output)


def _write(
    data: dict[str, Any], shown: RenderableType, console: Console, output: str | None
) -> None:
    text = json.dumps(data, indent=2) + "\n"
    if output == "-":
        console.file.write(text)
        return
    console.print(shown)
    if output is not None:
        Path(output).expanduser().write_text(text, encoding="utf-8")
