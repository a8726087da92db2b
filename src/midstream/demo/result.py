"""What the demo's run hands to the table and the report: plain values, ready for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from midstream.demo.fit import LayerScore


@dataclass(frozen=True)
class TokenMap:
    """One text, token by token, against the direction at every layer.

    Attributes:
        title: what it is.
        tokens: as text, one per column.
        cosine: `[layers][tokens]`, see `Fit.cosine`.
        projection: `[layers][tokens]`, see `Fit.project`.
    """

    title: str
    tokens: list[str]
    cosine: list[list[float]]
    projection: list[list[float]]


@dataclass(frozen=True)
class Answer:
    """One question answered at one strength.

    Attributes:
        scale: multiples of the direction that were added to each token's vector; 0: none.
        text: what the model wrote.
        reading: mean projection of the text's tokens when the model, not steered, reads it;
            None for a text too short to read.
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
class Receipt:
    """What one request asked for and what was done, as midstream wrote it."""

    request: str
    content: dict[str, Any]


@dataclass(frozen=True)
class Result:
    """Everything the report shows.

    Attributes:
        model: its name or folder's name.
        versions: of the packages that matter, by name.
        settings: how the engine ran, in words, by name.
        started: date and time, with the zone.
        seconds: wall time of each stage.
        classes: names of the positive and the negative class.
        num_pairs, num_folds: of sentences, and of the cross-validation.
        scores: one per layer.
        best_layer: the one that separates best.
        layer: the one that was steered.
        gap_norm: length of its direction.
        stream_norm: mean length of the vectors it was fitted on.
        token_maps, questions, receipts: what was read, written and done.
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
    receipts: list[Receipt]

    @property
    def scales(self) -> list[float]:
        """The strengths, 0 included, rising."""
        return [answer.scale for answer in self.questions[0].answers]

    def mean_readings(self) -> list[float | None]:
        """Per strength, the mean reading over all questions that have one."""
        means: list[float | None] = []
        for column in zip(*(question.answers for question in self.questions), strict=True):
            readings = [a.reading for a in column if a.reading is not None]
            means.append(sum(readings) / len(readings) if readings else None)
        return means

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def format_scale(scale: float) -> str:
    """`+2`, `−0.5`, or `plain` for none."""
    if scale == 0:
        return "plain"
    return f"{scale:+g}".replace("-", "−")


def format_signed(value: float) -> str:
    """`+0.25`, `−1.50`: two decimals, and a true minus."""
    return f"{value:+.2f}".replace("-", "−")
