"""Result of the demo's run, for the table and the report: plain values, ready for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from midstream.fit.scores import LayerScore


@dataclass(frozen=True)
class TokenMap:
    """One text, token by token, against the direction at every layer.

    Attributes:
        title: description of the text.
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
        text: the generated text.
        reading: mean projection of the text's tokens when the unsteered model reads them; None for
            a text that is too short.
    """

    scale: float
    text: str
    reading: float | None


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
        started: date and time, with the zone.
        seconds: wall time of each stage.
        classes: names of the positive and the negative class.
        num_pairs, num_folds: number of pairs of sentences, and of folds of the cross-validation.
        scores: one per layer.
        best_layer: the layer that separates best.
        layer: the steered layer.
        gap_norm: length of the steered layer's direction.
        stream_norm: mean length of the vectors that the direction was fitted on.
        token_maps, questions, receipts: texts token by token, answers, and receipts.
    """

    model: str
    versions: dict[str, str]
    settings: dict[str, str]
    started: str
    seconds: dict[str, float]
    classes: tuple[str, str]
    num_pairs: int
    num_folds: int
    scores: tuple[LayerScore, ...]
    best_layer: int
    layer: int
    gap_norm: float
    stream_norm: float
    token_maps: list[TokenMap]
    questions: list[Question]
    receipts: list[RequestReceipt]

    @property
    def scales(self) -> list[float]:
        """The strengths in rising order, 0 included."""
        return [answer.scale for answer in self.questions[0].answers]

    def mean_readings(self) -> list[float | None]:
        """Return the mean reading of each strength; None if no answer has a reading."""
        means: list[float | None] = []
        for column in zip(*(question.answers for question in self.questions), strict=True):
            readings = [a.reading for a in column if a.reading is not None]
            means.append(sum(readings) / len(readings) if readings else None)
        return means

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def format_scale(scale: float) -> str:
    """Format a strength: `+2`, `−0.5`, or `plain` for 0."""
    if scale == 0:
        return "plain"
    return f"{scale:+g}".replace("-", "−")


def format_signed(value: float) -> str:
    """Format a number with its sign, two decimals and a true minus: `+0.25`, `−1.50`."""
    return f"{value:+.2f}".replace("-", "−")
