"""The command of the demo. Heavy packages are imported after the environment is set, which vLLM
reads on import, and after the options are parsed, so that `--help` is instant.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midstream.errors import MissingExtraError
from midstream.lab.demo import prompts
from midstream.lab.report import command
from midstream.lab.report.command import ReportOptions

if TYPE_CHECKING:
    from midstream.lab.report.progress import Stages


def demo(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Hugging Face folder of a model; also --model.",
            show_default="make SmolLM2-135M-Instruct",
        ),
    ] = None,
    models_dir: Annotated[
        str,
        typer.Option(metavar="FOLDER", help="Where SmolLM2-135M-Instruct is, or where to make it."),
    ] = ".models",
    layer: command.Layer = None,
    scales: command.Scales = None,
    max_tokens: command.MaxTokens = 40,
    seed: command.Seed = 0,
    out: command.Out = Path("report.html"),
    compiled: command.Compiled = False,
    verbose: command.Verbose = False,
) -> None:
    """Capture, steer and show a real model on this machine, and write a report.

    Captures glad and sad sentences, fits a direction, answers the same questions plain and steered,
    and writes one HTML file that needs no network. `midstream report` does the same for your own
    pairs of texts. Exit status: 0 success; 1 it failed; 2 an option is wrong; 130 it was
    interrupted.

    Example: midstream demo --scales -2 2 --layer 16 --out report.html
    """
    MissingExtraError.require("vllm", "midstream demo")
    options = ReportOptions(
        pairs=prompts.PAIRS,
        questions=prompts.QUESTIONS,
        classes=(prompts.POSITIVE, prompts.NEGATIVE),
        shown_pair=prompts.SHOWN_PAIR,
        find_model=partial(_find_model, model, models_dir),
        command=command.called_as("demo"),
        layer=layer,
        scales=tuple(scales or command.DEFAULT_SCALES),
        max_tokens=max_tokens,
        seed=seed,
        out=out,
        compiled=compiled,
        verbose=verbose,
    )
    raise typer.Exit(command.show(options))


def main(arguments: list[str] | None = None) -> None:
    """Run the command as `python -m midstream.lab.demo`, and exit."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(cls=command.ScalesCommand)(demo)
    app(arguments, prog_name="python -m midstream.lab.demo")


def _find_model(model: str | None, models_dir: str, stages: Stages) -> str:
    """Return the model's folder; make SmolLM2's if no folder was given."""
    from midstream.lab.demo.model.smollm2 import NAME, make_smollm2

    if model is None:
        with stages(f"making {NAME}"):
            return str(make_smollm2(Path(models_dir) / NAME, stages.advance).absolute())
    with stages("finding the model"):
        return command.find_folder(model)
