"""The answers side by side, for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from midstream.lab.report.result import Question, Result, format_signed
from midstream.viz.answer_cards import strength


def answers(result: Result, width: int) -> Group:
    """Return one table per question, with a column per strength, or a row if that is too narrow."""
    wide = width // len(result.scales) >= 22
    tables = [_columns(q) if wide else _rows(q) for q in result.questions]
    return Group(*tables, _summary(result))


def _heading(answer_scale: float) -> Text:
    style = "bold" if answer_scale == 0 else "dark_orange" if answer_scale > 0 else "dodger_blue1"
    return Text(strength(answer_scale), style)


def _titled(question: Question, show_header: bool) -> Table:
    return Table(
        title=Text(question.prompt, "bold"),  # as Text: brackets in a prompt are not markup
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_header=show_header,
        expand=True,
    )


def _columns(question: Question) -> Table:
    table = _titled(question, show_header=True)
    for answer in question.answers:
        table.add_column(_heading(answer.scale), ratio=1)
    table.add_row(*(Text(answer.text) for answer in question.answers))
    return table


def _rows(question: Question) -> Table:
    table = _titled(question, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    for answer in question.answers:
        table.add_row(_heading(answer.scale), Text(answer.text))
    return table


def _summary(result: Result) -> Text:
    best = result.scores[result.layer]
    listed = _by_strength(result, "reading")
    coherence = _by_strength(result, "logprob")
    return Text(
        f"Layer {result.layer} separates {result.classes[0]} from {result.classes[1]} in held-out"
        f" texts with AUC {best.auc:.3f}. Mean reading by strength: {listed}. Mean log-probability"
        f" of the answers' tokens without steering, in nats: {coherence}."
    )


def _by_strength(result: Result, name: str) -> str:
    pairs = zip(result.scales, result.means_of(name), strict=True)
    return ", ".join(
        f"{strength(scale)}: {format_signed(value)}" for scale, value in pairs if value == value
    )
