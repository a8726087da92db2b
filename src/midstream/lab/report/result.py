"""Result of a run, for the table and the page: plain values, ready for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from midstream.lab.fit.scores import LayerScore
from midstream.lab.report.pairs import Pair


@dataclass(frozen=True)
class TokenMap:
    """One text, token by token, against the direction at every layer.

    Attributes:
        tokens: the tokens as text, one per column.
        cosine: `[layers][tokens]`, see `Directions.cosine`.
        projection: `[layers][tokens]`, see `Directions.project`.
    """

    title: str
    tokens: list[str]
    cosine: list[list[float]]
    projection: list[list[float]]


@dataclass(frozen=True)
class Answer:
    """One question answered at one strength.

    Attributes:
        scale: multiple of the direction that was added to each token's vector; 0 for none.
        reading: mean projection of the text's tokens when the unsteered model reads them; None for
            a text that is too short.
        logprob: mean log-probability of the text's tokens in nats, given the question, under the
            unsteered model; None for a text without tokens.
        repetition: share of the runs of three tokens that occurred before in the text, 0 to 1;
            None for a text of fewer than three tokens.
    """

    scale: float
    text: str
    reading: float | None
    logprob: float | None = None
    repetition: float | None = None


@dataclass(frozen=True)
class Question:
    """One question and its answers, by rising scale."""

    prompt: str
    answers: list[Answer]


@dataclass(frozen=True)
class RequestReceipt:
    """The receipt of one request: what was requested and what was done."""

    request: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """Everything the report shows.

    Attributes:
        model: name of the model or its folder.
        versions: versions of the relevant packages, by name.
        settings: the engine's settings in words, by name.
        classes: names of the positive and the negative class.
        pairs: the texts that the direction was fitted on, (positive, negative).
        num_folds: number of folds of the cross-validation.
        stream_norm: mean length of the vectors that the direction was fitted on.
        token_maps, questions, receipts: texts token by token, answers, and receipts.
        source: what `LLM` loads: a folder or a name.
        arguments: further arguments of `LLM`.
        command: the command that made the result; empty: unknown.
        vectors: bytes of the file that `Directions.save` wrote.
        gguf: bytes of the file that `Directions.to_gguf` wrote, without layer 0; None if the
            package gguf is not installed.
    """

    model: str
    versions: dict[str, str]
    settings: dict[str, str]
    started: str
    seconds: dict[str, float]
    classes: tuple[str, str]
    pairs: list[Pair]
    num_folds: int
    scores: tuple[LayerScore, ...]
    best_layer: int
    layer: int
    gap_norm: float
    stream_norm: float
    token_maps: list[TokenMap]
    questions: list[Question]
    receipts: list[RequestReceipt]
    source: str
    arguments: dict[str, Any]
    max_tokens: int
    command: str
    vectors: bytes
    gguf: bytes | None

    @property
    def scales(self) -> list[float]:
        """The strengths in rising order, 0 included."""
        return [answer.scale for answer in self.questions[0].answers]

    def values_of(self, name: str) -> list[list[float]]:
        """Return a number of each answer, `reading`, `logprob` or `repetition`.

        Returns:
            [questions][strengths]; NaN where an answer has none.
        """
        return [
            [_number(getattr(answer, name)) for answer in question.answers]
            for question in self.questions
        ]

    def means_of(self, name: str) -> list[float]:
        """Return the means over the questions, by strength; NaN if no answer has the number."""
        means = []
        for column in zip(*self.values_of(name), strict=True):
            known = [value for value in column if not math.isnan(value)]
            means.append(sum(known) / len(known) if known else math.nan)
        return means

    def to_dict(self) -> dict[str, Any]:
        """Return all but the two files as plain values."""
        fields = asdict(self)
        fields.pop("vectors")
        fields.pop("gguf")
        return fields


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def format_signed(value: float) -> str:
    """Format a number with its sign, two decimals and a true minus: `+0.25`, `−1.50`."""
    return f"{value:+.2f}".replace("-", "−")
