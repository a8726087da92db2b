"""Result of a run, for the table and the page: plain values, ready for JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from midstream.lab.fit.scores import LayerScore
from midstream.lab.report.pairs import Pair


@dataclass(frozen=True)
class TokenMap:
    """One text, token by token, against the direction at every layer: `[layers][tokens]`."""

    title: str
    tokens: list[str]
    cosine: list[list[float]]
    projection: list[list[float]]


@dataclass(frozen=True)
class Answer:
    """One question answered at one strength."""

    scale: float  # multiple of the direction that was added; 0: none
    text: str
    reading: float | None  # mean projection, unsteered; None: too short
    logprob: float | None = None  # mean of the tokens, unsteered, in nats
    repetition: float | None = None  # share of repeated trigrams, 0 to 1


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
    """Everything the report shows."""

    model: str
    versions: dict[str, str]  # of packages, by name
    settings: dict[str, str]  # of the engine, in words
    started: str
    seconds: dict[str, float]
    classes: tuple[str, str]  # positive and negative
    pairs: list[Pair]
    num_folds: int
    scores: tuple[LayerScore, ...]
    best_layer: int
    layer: int
    gap_norm: float
    stream_norm: float  # mean length of the vectors that were fitted
    token_maps: list[TokenMap]
    questions: list[Question]
    receipts: list[RequestReceipt]
    source: str  # what `LLM` loads: a folder or a name
    arguments: dict[str, Any]  # further ones of `LLM`
    max_tokens: int
    command: str  # that made the result; empty: unknown
    vectors: bytes  # file that `Directions.save` wrote
    gguf: bytes | None  # file that `Directions.to_gguf` wrote; None: gguf is not installed

    @property
    def scales(self) -> list[float]:
        """The strengths in rising order, 0 included."""
        return [answer.scale for answer in self.questions[0].answers]

    def values_of(self, name: str) -> list[list[float]]:
        """Return a number of each answer, [questions][strengths]; NaN where an answer has none."""
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
        fields = asdict(self)
        fields.pop("vectors")
        fields.pop("gguf")
        return fields


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def format_signed(value: float) -> str:
    """Format a number with its sign, two decimals and a true minus: `+0.25`, `−1.50`."""
    return f"{value:+.2f}".replace("-", "−")
