"""The demo's main job: capture, fit, steer, and read back what was written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.demo import DemoError, prompts
from midstream.demo.engine import DemoEngine, DemoReply, Push, Request
from midstream.demo.result import Answer, Question, RequestReceipt, Result, TokenMap, format_scale
from midstream.fit import Directions

Stage = Callable[[str], AbstractContextManager[None]]
"""Called with a stage's description; returns the context in which the stage runs."""


@dataclass(frozen=True)
class DemoPlan:
    """What to do on an engine.

    Attributes:
        model: name of the model, for the report.
        scales: strengths, in multiples of the distance between the two class means.
        layer: layer to steer; None for the layer that separates best.
        max_tokens: tokens to generate for each answer.
        seed: seed of the cross-validation's folds.
        num_folds: number of the folds; at most one per pair.
        pairs, questions: sentences to capture, and questions to answer.
        versions, settings: descriptions for the report, by name.
    """

    model: str
    scales: tuple[float, ...] = (-2.0, -1.0, 1.0, 2.0)
    layer: int | None = None
    max_tokens: int = 40
    seed: int = 0
    num_folds: int = 6
    pairs: Sequence[prompts.Pair] = prompts.PAIRS
    questions: Sequence[str] = prompts.QUESTIONS
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)


def run(engine: DemoEngine, plan: DemoPlan, stage: Stage) -> Result:
    """Run the whole job on a started engine, and return its result."""
    started = time.strftime("%Y-%m-%d %H:%M %Z")
    job = _Job(engine, plan, stage)
    with job.timed(f"capturing {2 * len(plan.pairs)} sentences at all layers", "capture"):
        captured = job.capture_pairs()
    with job.timed("fitting a direction at every layer", "fit"):
        fitted = _fit_last_rows(captured, plan)
    layer = _choose_layer(fitted, plan.layer)
    with job.timed(f"writing {len(plan.questions)} answers, plain and steered", "generate"):
        written = job.write(fitted, layer)
    with job.timed("reading what was written", "read"):
        questions = job.read_back(written, fitted, layer)
    return Result(
        model=plan.model,
        versions=plan.versions,
        settings=plan.settings,
        started=started,
        seconds=job.seconds,
        classes=(prompts.POSITIVE, prompts.NEGATIVE),
        num_pairs=len(plan.pairs),
        num_folds=fitted.num_folds,
        scores=tuple(fitted.scores[each] for each in fitted.layers),
        best_layer=fitted.best_layer,
        layer=layer,
        gap_norm=fitted[layer].gap,
        stream_norm=_mean_norm(captured, layer),
        token_maps=job.map_tokens(captured, written, fitted),
        questions=questions,
        receipts=job.receipts,
    )


class _Job:
    """One run: its engine and plan, and the receipts and times that it collects."""

    def __init__(self, engine: DemoEngine, plan: DemoPlan, stage: Stage) -> None:
        self.engine = engine
        self.plan = plan
        self.stage = stage
        self.receipts: list[RequestReceipt] = []
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, words: str, key: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.stage(words):
            yield
        self.seconds[key] = time.perf_counter() - start

    def capture_pairs(self) -> list[DemoReply]:
        """Capture every pair, and return the replies in the order p0, n0, p1, n1, …

        The pair that the report shows is captured at all tokens, the others at their last token.
        """
        requests = [
            Request(
                name=f"pair {index + 1}, {name}",
                token_ids=self._encode(text),
                capture="prompt" if index == self._shown_pair else "last_prompt",
            )
            for index, pair in enumerate(self.plan.pairs)
            for name, text in ((prompts.POSITIVE, pair.positive), (prompts.NEGATIVE, pair.negative))
        ]
        return self._run(requests)

    def write(self, fitted: Directions, layer: int) -> list[list[DemoReply]]:
        """Generate all answers in one mixed batch.

        Returns:
            For each question, its answers by rising strength.
        """
        vector = torch.from_numpy(fitted[layer].vector)
        requests = [
            Request(
                name=f"question {index + 1}, {format_scale(scale)}",
                token_ids=self._encode_chat(question),
                max_tokens=self.plan.max_tokens,
                capture="generated" if index == 0 else None,
                push=Push(vector, layer, scale) if scale else None,
            )
            for index, question in enumerate(self.plan.questions)
            for scale in self._scales
        ]
        replies, step = self._run(requests), len(self._scales)
        return [replies[at : at + step] for at in range(0, len(replies), step)]

    def read_back(
        self, written: list[list[DemoReply]], fitted: Directions, layer: int
    ) -> list[Question]:
        """Read each answer with the unsteered model.

        Returns:
            The questions, with their answers and readings.
        """
        encoded = [self._encode(reply.text.strip()) for row in written for reply in row]
        requests = [
            Request(f"reading answer {index + 1}", token_ids, capture="prompt")
            for index, token_ids in enumerate(encoded)
            if len(token_ids) > 1
        ]
        replies = iter(self._run(requests))
        readings = iter(
            [_mean_reading(next(replies), fitted, layer) if len(t) > 1 else None for t in encoded]
        )
        return [
            Question(
                prompt,
                [
                    Answer(scale, reply.text.strip(), next(readings))
                    for scale, reply in zip(self._scales, row, strict=True)
                ],
            )
            for prompt, row in zip(self.plan.questions, written, strict=True)
        ]

    def map_tokens(
        self, captured: list[DemoReply], written: list[list[DemoReply]], fitted: Directions
    ) -> list[TokenMap]:
        """Map the shown pair, and the first question's answers: lowest scale, plain, highest."""
        shown = captured[2 * self._shown_pair : 2 * self._shown_pair + 2]
        maps = [
            self._map(f"A {name} sentence, read", reply, fitted)
            for name, reply in zip((prompts.POSITIVE, prompts.NEGATIVE), shown, strict=True)
        ]
        question = self.plan.questions[0]
        for scale, reply in zip(self._scales, written[0], strict=True):
            if scale in (0, self._scales[0], self._scales[-1]) and len(reply.token_ids) > 0:
                how = f"steered by {format_scale(scale)}" if scale else "plain"
                maps.append(self._map(f"“{question}”, answered {how}", reply, fitted))
        return maps

    @property
    def _scales(self) -> list[float]:
        return sorted({0.0, *self.plan.scales})

    @property
    def _shown_pair(self) -> int:
        return min(prompts.SHOWN_PAIR, len(self.plan.pairs) - 1)

    def _map(self, title: str, reply: DemoReply, fitted: Directions) -> TokenMap:
        rows = _rows(reply)
        return TokenMap(
            title=title,
            tokens=[self.engine.tokenizer.decode([token]) for token in reply.token_ids],
            cosine=_rounded(fitted.cosine(rows)),
            projection=_rounded(fitted.project(rows)),
        )

    def _run(self, requests: list[Request]) -> list[DemoReply]:
        if not requests:
            return []
        replies = self.engine.run(requests)
        for request, reply in zip(requests, replies, strict=True):
            if reply.receipt is not None:
                self.receipts.append(RequestReceipt(request.name, reply.receipt))
            elif request.capture or request.push:
                raise DemoError(
                    f"{request.name}: the request captures or steers, but has no receipt"
                )
        return replies

    def _encode(self, text: str) -> list[int]:
        return list(self.engine.tokenizer(text)["input_ids"])

    def _encode_chat(self, question: str) -> list[int]:
        tokenizer: Any = self.engine.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            return self._encode(question)
        turns = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        # The template already contains the special tokens.
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _rows(reply: DemoReply) -> torch.Tensor:
    assert reply.rows is not None, "the request asked for a capture"
    return reply.rows


def _rounded(values: NDArray[np.float32]) -> list[list[float]]:
    """Return nested lists with four decimals, which take a quarter of the bytes of all decimals."""
    return [[round(float(value), 4) for value in row] for row in values]


def _fit_last_rows(captured: list[DemoReply], plan: DemoPlan) -> Directions:
    last = torch.stack([_rows(reply)[:, -1] for reply in captured])
    return Directions.from_rows(last[0::2], last[1::2], folds=plan.num_folds, seed=plan.seed)


def _choose_layer(fitted: Directions, wanted: int | None) -> int:
    num_layers = len(fitted)
    if wanted is None:
        return fitted.best_layer
    if not -num_layers <= wanted < num_layers:
        raise DemoError(f"--layer {wanted}: the model has layers 0 to {num_layers - 1}")
    return wanted % num_layers


def _mean_reading(reply: DemoReply, fitted: Directions, layer: int) -> float:
    """Return the mean projection at `layer` of all tokens but the first.

    The first token is an attention sink: its vector is huge, and the same for every text.
    """
    return float(fitted.project(_rows(reply))[layer, 1:].mean())


def _mean_norm(captured: list[DemoReply], layer: int) -> float:
    return float(torch.stack([_rows(reply)[layer, -1] for reply in captured]).norm(dim=-1).mean())
