"""The report: one self-contained HTML file, made from the run's result alone."""

from __future__ import annotations

from typing import Any

from midstream.demo import charts
from midstream.demo.charts import ChartLine, Frame
from midstream.demo.html import data_block, escape, tag
from midstream.demo.result import Question, RequestReceipt, Result, format_scale, format_signed
from midstream.demo.template import page

DATA_ID = "midstream-demo"
"""Id of the element that contains the result as JSON."""


def render(result: Result) -> str:
    """Return the whole HTML document."""
    sections = [
        _header(result),
        _separability(result),
        _token_maps(result),
        _answers(result),
        _receipts(result.receipts),
    ]
    body = "\n".join(sections)
    return page(f"midstream: {result.model}", body, data_block(DATA_ID, result.to_dict()))


def _header(result: Result) -> str:
    positive, negative = result.classes
    title = f"From {negative} to {positive}: reading and steering {result.model}"
    lead = (
        f"{result.num_pairs} scenes, each told with a {positive} and a {negative} end, were read"
        " by the model. The mean difference of its activations is a direction. Added back while"
        f" the model answers, it moves what is written, here from layer {result.layer} onwards."
    )
    facts = {
        "model": result.model,
        **result.settings,
        **result.versions,
        "made": result.started,
        "time": ", ".join(f"{stage} {took:.1f} s" for stage, took in result.seconds.items()),
    }
    listed = "".join(
        tag("div", tag("dt", escape(name)) + tag("dd", escape(value)))
        for name, value in facts.items()
    )
    return tag(
        "header", tag("h1", escape(title)) + tag("p", escape(lead), "lead") + tag("dl", listed)
    )


def _separability(result: Result) -> str:
    positive, negative = result.classes
    best = result.scores[result.best_layer]
    steered = (
        "It is the layer steered below."
        if result.layer == result.best_layer
        else f"Layer {result.layer} is the one steered below."
    )
    words = (
        f"Does the direction tell {positive} from {negative} in sentences that it was not fitted"
        f" on? In {result.num_folds}-fold cross-validation, both halves of a pair held out"
        f" together, layer {result.best_layer} does best: AUC {best.auc:.3f}, accuracy"
        f" {best.accuracy:.1%}, d′ {best.d_prime:.2f}. {steered} The layer was picked by these"
        " numbers, so they are slightly optimistic; the curve around it is stronger evidence."
    )
    num_layers = len(result.scores)
    accuracy = ChartLine("accuracy", [score.accuracy for score in result.scores], "b")
    auc = ChartLine("AUC", [score.auc for score in result.scores], "a")
    d_prime = ChartLine("d′", [score.d_prime for score in result.scores], "a")
    lowest = min([0.5, *auc.values, *accuracy.values])
    first = charts.layer_chart(
        "AUC and accuracy by layer",
        [accuracy, auc],
        Frame(num_layers, lowest - 0.05, 1.02),
        result.layer,
        guess=0.5,
    )
    top = max([1.0, *d_prime.values]) * 1.06
    second = charts.layer_chart(
        "d′ by layer",
        [d_prime],
        Frame(num_layers, min([0.0, *d_prime.values]), top),
        result.layer,
        guess=0.0,
    )
    keys = f"{tag('span', 'AUC', 'key-a')} and {tag('span', 'accuracy', 'key-b')}"
    figures = [
        _figure(f"{keys} on held-out sentences, by layer; dashed: guessing", first),
        _figure(
            f"{tag('span', 'd′', 'key-a')}: distance between the classes in standard deviations",
            second,
        ),
    ]
    return _section(
        "separability", "Where the two classes part", words, tag("div", "".join(figures), "pair")
    )


def _token_maps(result: Result) -> str:
    positive, negative = result.classes
    limit = charts.color_limit(result.token_maps)
    # An AUC of one half is guessing: the colours of such a layer mean nothing.
    weights = [max(0.0, 2 * score.auc - 1) for score in result.scores]
    words = (
        "Each cell is one activation of the residual stream: one token at one layer, with layer 0"
        " at the bottom. Its colour is the cosine between the activation, minus the midpoint of the"
        " two classes, and the layer’s direction. Rows are fainter where the layer’s direction"
        f" separates the classes less. Layer {result.layer} is outlined. Point at a cell to see its"
        f" numbers: the mean of the {positive} sentences has a projection of +1, that of the"
        f" {negative} ones −1. The first two texts are training examples. For answers, the"
        " activations are those recorded during generation."
    )
    ramp = tag("span", "".join(tag("i", cls=f"b{i}") for i in range(charts.NUM_BINS)), "ramp")
    ends = f"{escape(negative)} −{limit:.2f}", f"+{limit:.2f} {escape(positive)}"
    legend = tag("div", tag("span", ends[0]) + ramp + tag("span", ends[1]), "legend")
    figures = [
        _figure(
            tag("strong", escape(token_map.title)),
            _scroll(charts.heatmap(token_map, limit, result.layer, weights)),
        )
        for token_map in result.token_maps
    ]
    # The first two are the two ends of one scene, short enough to lie side by side.
    pair = tag("div", "".join(figures[:2]), "pair")
    return _section(
        "tokens", "Token by token, layer by layer", words, legend + pair + "".join(figures[2:])
    )


def _answers(result: Result) -> str:
    positive, negative = result.classes
    words = (
        "The same questions at temperature 0, all strengths in one batch. Strength 1 adds"
        f" the whole distance between the class means, a vector of length {result.gap_norm:.1f}, to"
        f" a stream of length {result.stream_norm:.0f} on average, after layer {result.layer}, at"
        " every token. Each answer was then read by the model without steering. Its reading is the"
        f" mean projection of its tokens on the direction: higher is more {positive}, lower is more"
        f" {negative}. Compare readings only with one another: answers are not like the training"
        " sentences, so even a plain answer need not lie at the midpoint."
    )
    rows = [[answer.reading for answer in question.answers] for question in result.questions]
    chart = _figure(
        f"{tag('span', 'Mean reading', 'key-a')} of the answers by strength; faint: each question",
        charts.strength_chart("Mean reading by strength", result.scales, rows),
    )
    largest = max(abs(scale) for scale in result.scales) or 1.0
    asked = "".join(_question(question, largest) for question in result.questions)
    return _section("answers", "What it writes", words, tag("div", chart, "pair") + asked)


def _question(question: Question, largest: float) -> str:
    cards = []
    for answer in question.answers:
        reading = answer.reading
        read = "not read" if reading is None else f"reads {format_signed(reading)}"
        strength = tag("strong", escape(format_scale(answer.scale)))
        chip = tag("div", strength + tag("span", escape(read)), "chip")
        text = tag("p", escape(answer.text) or "(nothing)")
        color = charts.color_bin(answer.scale, largest)
        cards.append(tag("div", chip + text, f"answer b{color}"))
    return tag("h3", escape(question.prompt)) + tag("div", "".join(cards), "answers")


def _receipts(receipts: list[RequestReceipt]) -> str:
    rows = [_receipt_cells(receipt) for receipt in receipts]
    captured = sum(_count_rows(receipt.content)[0] for receipt in receipts)
    edited = sum(_count_edits(receipt.content)[0] for receipt in receipts)
    bad = sum(receipt.content.get("status") != "ok" for receipt in receipts)
    words = (
        f"{len(receipts)} requests captured or steered: {captured:,} vectors captured,"
        f" {edited:,} edits made. "
        + (f"{bad} of them differ from the request." if bad else "All did what was requested.")
        + " A receipt counts what a request asked for against what the device did."
    )
    names = ["request", "status", "tokens", "vectors", "edits", "remarks"]
    head = tag("tr", "".join(tag("th", name) for name in names))
    body = "".join(tag("tr", "".join(tag("td", escape(c)) for c in row)) for row in rows)
    table = tag("table", tag("thead", head) + tag("tbody", body))
    shown = tag("summary", "Every receipt") + _scroll(table)
    return _section("receipts", "Receipts", words, tag("details", shown))


def _receipt_cells(receipt: RequestReceipt) -> list[str]:
    content = receipt.content
    rows, wanted_rows = _count_rows(content)
    edits, wanted_edits = _count_edits(content)
    return [
        receipt.request,
        str(content.get("status", "no receipt")),
        f"{content.get('prompt_tokens', 0)} + {content.get('generated_tokens', 0)}",
        f"{rows} of {wanted_rows}" if wanted_rows else "",
        f"{edits} of {wanted_edits}" if wanted_edits else "",
        "; ".join(content.get("problems", ())),
    ]


def _count_rows(content: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of captured rows and of requested rows."""
    captured = content.get("captured") or ()
    return sum(c["actual"] for c in captured), sum(c["expected"] for c in captured)


def _count_edits(content: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of applied edits and of requested edits."""
    edited = content.get("edited") or {"applied": 0, "expected": 0}
    return edited["applied"], edited["expected"]


def _scroll(content: str) -> str:
    """Return content in a box that scrolls sideways, by keyboard too, on narrow screens."""
    return tag("div", content, "scroll", tabindex="0")


def _figure(caption: str, picture: str) -> str:
    return tag("figure", tag("figcaption", caption) + picture)


def _section(name: str, title: str, words: str, content: str) -> str:
    return tag("section", tag("h2", escape(title)) + tag("p", escape(words)) + content, id=name)
