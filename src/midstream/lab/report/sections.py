"""Sections of the page that show results: layers, tokens, strengths, answers."""

from __future__ import annotations

import numpy as np

from midstream import viz
from midstream.lab.report.result import Answer, Result, TokenMap, format_signed
from midstream.viz.markup import escape, tag


def layers_section(result: Result) -> str:
    """How well each layer's direction tells the classes apart."""
    positive, negative = result.classes
    best = result.scores[result.best_layer]
    steered = (
        "It is the layer steered below."
        if result.layer == result.best_layer
        else f"Layer {result.layer} is the one steered below."
    )
    words = (
        f"Does the direction tell {positive} from {negative} in texts that it was not fitted on? In"
        f" {result.num_folds}-fold cross-validation, with both texts of a pair held out together,"
        f" layer {result.best_layer} does best: AUC {best.auc:.3f}, accuracy {best.accuracy:.1%},"
        f" d′ {best.d_prime:.2f}. {steered} The layer was chosen by these numbers, so they are"
        " slightly optimistic; the curve around it is stronger evidence. Bars are standard errors"
        " over the folds."
    )
    pictures = [
        _by_layer(result, {"d_prime": "d′"}, "Distance of the classes", 0.0),
        _by_layer(result, {"auc": "AUC", "accuracy": "accuracy"}, "AUC and accuracy", 0.5),
    ]
    return _words(words) + tag("div", "".join(picture.body for picture in pictures), "pair")


def _by_layer(result: Result, names: dict[str, str], title: str, level: float) -> viz.Chart:
    """Draw scores by layer, with their standard errors over the folds."""
    lines, ranges = {}, {}
    for field, name in names.items():
        lines[name] = values = np.array([getattr(score, field) for score in result.scores])
        errors = [getattr(score, f"{field}_error") for score in result.scores]
        if None not in errors:
            ranges[name] = [values - errors, values + errors]
    return viz.curve(
        range(len(result.scores)),
        lines,
        title=f"{title}, on held-out texts",
        x_title="layer",
        y_title=(
            "d′ (standard deviations)" if "d_prime" in names else "fraction (dashed: guessing)"
        ),
        fmt=".3f",
        ranges=ranges,
        marked=result.layer,
        level=level,
    )


def maps_section(result: Result) -> str:
    """Texts token by token, against the direction of every layer."""
    positive, negative = result.classes
    limit = color_limit(result.token_maps)
    words = (
        "Each cell is one token at one layer, with the last layer on top. Its colour is the cosine"
        " between the activation, minus the midpoint of the two classes, and the layer’s direction:"
        f" orange is {positive}, blue is {negative}. Layer {result.layer}, which is steered, is"
        " outlined. The page's data has the projections too: there +1 is the mean of the"
        f" {positive} texts, −1 that of the {negative} ones."
    )
    caution = (
        "A row means something only where its layer tells the classes apart: where the layer’s AUC"
        " is near 0.5, colours show other differences between tokens."
        " Directions and midpoints come from the last token of each text, so compare the tokens of"
        " a row with each other rather than with zero. Where nearly a whole row has one colour, as"
        " often at the last layer, all of these tokens differ from the last tokens in the same way,"
        " whatever the class. The first two maps show a pair that the directions were fitted on. In"
        " the answers, the activations are those recorded while they were generated."
    )
    maps = "".join(_map(token_map, result, limit).body for token_map in result.token_maps)
    return _words(words) + tag("div", maps, "maps") + _words(caution)


def _map(token_map: TokenMap, result: Result, limit: float) -> viz.Chart:
    return viz.heatmap(
        token_map.cosine,
        range(len(result.scores)),
        token_map.tokens,
        title=token_map.title,
        row_title="layer",
        column_title="token",
        value_title="cosine with the direction",
        fmt="+.2f",
        limits=(-limit, limit),
        marked=result.layer,
    )


def color_limit(token_maps: list[TokenMap]) -> float:
    """Return the limit of the colours of all maps: 98 % of the cells are below it."""
    sizes = sorted(
        abs(value) for token_map in token_maps for row in token_map.cosine for value in row
    )
    return sizes[int(0.98 * (len(sizes) - 1))] or 1.0 if sizes else 1.0


def effect_section(result: Result) -> str:
    positive, negative = result.classes
    words = (
        "The same questions at temperature 0, all strengths in one batch. Strength 1 adds the whole"
        f" distance between the class means, a vector of length {result.gap_norm:.1f}, to"
        f" activations of length {result.stream_norm:.0f} on average, after layer {result.layer},"
        " at every token."
        " Each answer was then read by the model without steering. Its reading is the mean"
        f" projection of its tokens on the direction: higher is more {positive}, lower is more"
        f" {negative}. Compare readings with one another only: answers are unlike the texts of the"
        " pairs, so even a plain answer need not lie at the midpoint."
    )
    coherence = (
        "Steering that is too strong breaks the text, and two measures show where. Log-probability:"
        " how likely the model without steering finds the answer after its question, per token; a"
        " steep fall is text that the model would not write. Repetition: the share of runs of three"
        " tokens that the answer had before; repeated text is likely, so the first measure misses"
        " it. A larger reading counts for little where either is bad. Points are means over the"
        " questions; bars go from the least to the largest answer."
    )
    pictures = [
        _by_strength(result, "reading", "Reading", f"{negative} ← reading → {positive}"),
        _by_strength(result, "logprob", "Log-probability of the answers", "nats per token"),
        _by_strength(result, "repetition", "Repetition", "share of repeated trigrams"),
    ]
    charts = "".join(picture.body for picture in pictures)
    return _words(words) + tag("div", charts + tag("p", escape(coherence)), "pair")


def _by_strength(result: Result, name: str, title: str, y_title: str) -> viz.Chart:
    rows = np.array(result.values_of(name))
    # Bars from the least to the largest answer, where there is one.
    ends = [np.fmin.reduce(rows), np.fmax.reduce(rows)]
    return viz.curve(
        result.scales,
        {"mean": result.means_of(name)},
        title=title,
        x_title="strength",
        y_title=y_title,
        fmt=".2f",
        ranges={"mean": ends},
    )


def answers_section(result: Result) -> str:
    words = (
        "Beside each answer are its reading and its log-probability per token, in nats, under the"
        " model without steering."
    )
    pictures = [
        viz.answers(
            {answer.scale: answer.text for answer in question.answers},
            notes={answer.scale: _note(answer) for answer in question.answers},
            title=f"{number}. {question.prompt}",
        )
        for number, question in enumerate(result.questions, 1)
    ]
    return _words(words) + "".join(picture.body for picture in pictures)


def _note(answer: Answer) -> str:
    reading, logprob = answer.reading, answer.logprob
    read = "not read" if reading is None else f"reads {format_signed(reading)}"
    return read if logprob is None else f"{read}, {format_signed(logprob)} nats"


def _words(words: str) -> str:
    return tag("p", escape(words))
