"""`midstream report`: a direction between one's own pairs of texts, as an HTML page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midstream.cli.command import whole
from midstream.errors import MissingExtraError, SpecError
from midstream.lab.report import command
from midstream.lab.report.command import ReportOptions
from midstream.lab.report.command import ScalesCommand as CommandClass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from midstream.lab.report.pairs import Pair
    from midstream.lab.report.progress import Stages

__all__ = ["CommandClass", "report"]


def report(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or name of the model; also --model.")
    ],
    pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help='JSONL: {"positive": "…", "negative": "…"} on each line.'
        ),
    ] = None,
    positive: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Positive texts, one a line, instead of --pairs."),
    ] = None,
    negative: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Negative texts; line n of both files is a pair."),
    ] = None,
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Questions to answer plain and steered, one a line.",
            show_default="six everyday ones",
        ),
    ] = None,
    classes: Annotated[
        tuple[str, str],
        typer.Option(metavar="POSITIVE NEGATIVE", help="What the page calls the two classes."),
    ] = ("positive", "negative"),
    layer: command.Layer = None,
    scales: command.Scales = None,
    max_tokens: command.MaxTokens = 40,
    max_length: Annotated[
        int,
        typer.Option(
            parser=whole(16), metavar="N", help="Most tokens of a text, or question and answer."
        ),
    ] = 1024,
    seed: command.Seed = 0,
    out: command.Out = Path("report.html"),
    compiled: command.Compiled = False,
    verbose: command.Verbose = False,
) -> None:
    """Fit a direction to your own pairs of texts, steer with it, and write a report.

    Captures each text at its last token, fits a direction at every layer, answers questions plain
    and steered, and measures effect and coherence by strength. The report is one HTML file that
    needs no network, with the direction to download. Exit status: 0 success; 1 it failed; 2 an
    option or a file is wrong; 130 it was interrupted.

    Example: midstream report meta-llama/Llama-3.2-1B-Instruct --pairs pairs.jsonl
    """
    try:
        text_pairs, asked = _read(pairs, positive, negative, questions)
    except SpecError as error:
        raise typer.BadParameter(str(error)) from None
    MissingExtraError.require("vllm", "midstream report")
    options = ReportOptions(
        pairs=text_pairs,
        questions=asked,
        classes=classes,
        find_model=partial(_find_model, model),
        command=command.called_as("report"),
        layer=layer,
        scales=tuple(scales or command.DEFAULT_SCALES),
        max_tokens=max_tokens,
        max_length=max_length,
        seed=seed,
        out=out,
        compiled=compiled,
        verbose=verbose,
        is_offline=Path(model).expanduser().exists(),
    )
    raise typer.Exit(command.show(options))


def _read(
    pairs: Path | None, positive: Path | None, negative: Path | None, questions: Path | None
) -> tuple[Sequence[Pair], Sequence[str]]:
    from midstream.lab.demo.prompts import QUESTIONS
    from midstream.lab.report.pairs import read_pairs, read_questions, read_two_files

    if pairs is not None and positive is None and negative is None:
        text_pairs = read_pairs(pairs)
    elif pairs is None and positive is not None and negative is not None:
        text_pairs = read_two_files(positive, negative)
    else:
        raise SpecError("", "expected --pairs FILE, or --positive FILE and --negative FILE")
    return text_pairs, QUESTIONS if questions is None else read_questions(questions)


def _find_model(model: str, stages: Stages) -> str:
    """Return the model's folder, or its name if there is no such folder."""
    with stages("finding the model"):
        return command.find_folder(model) if Path(model).expanduser().exists() else model
