"""The main job: capture, fit, steer, and read back what was written."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.lab.fit import Directions
from midstream.lab.report import ReportError
from midstream.lab.report.engine import EngineReply, Push, ReportEngine, Request
from midstream.lab.report.pairs import Pair
from midstream.lab.report.result import Answer, Question, RequestReceipt, Result, TokenMap
from midstream.viz.answer_cards import strength

Stage = Callable[[str], AbstractContextManager[None]]
"""Called with a stage's description; returns the context in which the stage runs."""


@dataclass(frozen=True)
class ReportPlan:
    """What to do on an engine; see `Result` for what the report shows."""

    model: str
    pairs: Sequence[Pair]
    questions: Sequence[str]
    classes: tuple[str, str] = ("positive", "negative")
    shown_pair: int = 0  # index of the pair that is shown token by token
    scales: tuple[float, ...] = (-2.0, -1.0, 1.0, 2.0)  # in distances between the class means
    layer: int | None = None  # None: the one that separates best
    max_tokens: int = 40
    seed: int = 0
    num_folds: int = 6  # at most one per pair
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    source: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    command: str = ""


def run(engine: ReportEngine, plan: ReportPlan, stage: Stage) -> Result:
    started = time.strftime("%Y-%m-%d %H:%M %Z")
    job = _Job(engine, plan, stage)
    with job.timed(f"capturing {2 * len(plan.pairs)} texts at all layers", "capture"):
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
        classes=plan.classes,
        pairs=list(plan.pairs),
        num_folds=fitted.num_folds,
        scores=tuple(fitted.scores[fitted_layer] for fitted_layer in fitted.layers),
        best_layer=fitted.best_layer,
        layer=layer,
        gap_norm=fitted[layer].gap,
        stream_norm=_mean_norm(captured, layer),
        token_maps=job.map_tokens(captured, written, fitted),
        questions=questions,
        receipts=job.receipts,
        source=plan.source or plan.model,
        arguments=plan.arguments,
        max_tokens=plan.max_tokens,
        command=plan.command,
        vectors=_file_of(fitted.save, "directions.safetensors"),
        gguf=_gguf_of(fitted),
    )


class _Job:
    """One run: its engine and plan, and the receipts and times that it collects."""

    def __init__(self, engine: ReportEngine, plan: ReportPlan, stage: Stage) -> None:
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

    def capture_pairs(self) -> list[EngineReply]:
        """Capture every pair at its last token, the shown one at all; return p0, n0, p1, n1, …"""
        requests = [
            Request(
                name=f"pair {index + 1}, {name}",
                token_ids=self._encode(text),
                capture="prompt" if index == self.plan.shown_pair else "last_prompt",
            )
            for index, pair in enumerate(self.plan.pairs)
            for name, text in zip(self.plan.classes, pair, strict=True)
        ]
        return self._run(requests)

    def write(self, fitted: Directions, layer: int) -> list[list[EngineReply]]:
        """Generate all answers in one batch; return those of each question by rising strength."""
        vector = torch.from_numpy(fitted[layer].vector)
        requests = [
            Request(
                name=f"question {index + 1}, {strength(scale)}",
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
        self, written: list[list[EngineReply]], fitted: Directions, layer: int
    ) -> list[Question]:
        """Read each answer with the unsteered model, alone and after its question."""
        replies = [reply for row in written for reply in row]
        readings = self._readings([reply.text.strip() for reply in replies], fitted, layer)
        asked = [self._encode_chat(question) for question in self.plan.questions]
        starts = [start for start, row in zip(asked, written, strict=True) for _ in row]
        logprobs = self._logprobs(starts, [reply.output_ids for reply in replies])
        answers = iter(
            Answer(scale, reply.text.strip(), reading, logprob, _repetition(reply.output_ids))
            for scale, reply, reading, logprob in zip(
                self._scales * len(written), replies, readings, logprobs, strict=True
            )
        )
        return [
            Question(prompt, [next(answers) for _ in row])
            for prompt, row in zip(self.plan.questions, written, strict=True)
        ]

    def _readings(self, texts: list[str], fitted: Directions, layer: int) -> list[float | None]:
        """Return the mean projection of each text's tokens; None for fewer than two tokens."""
        encoded = [self._encode(text) for text in texts]
        requests = [
            Request(f"reading answer {index + 1}", token_ids, capture="prompt")
            for index, token_ids in enumerate(encoded)
            if len(token_ids) > 1
        ]
        replies = iter(self._run(requests))
        return [
            _mean_reading(next(replies), fitted, layer) if len(t) > 1 else None for t in encoded
        ]

    def _logprobs(self, starts: list[list[int]], answers: list[list[int]]) -> list[float | None]:
        """Return the mean log-probability of each answer's tokens after its question."""
        pairs = [pair for pair in zip(answers, starts, strict=True) if pair[0]]
        means = iter(self.engine.score(*map(list, zip(*pairs, strict=True))) if pairs else [])
        return [next(means) if answer else None for answer in answers]

    def map_tokens(
        self, captured: list[EngineReply], written: list[list[EngineReply]], fitted: Directions
    ) -> list[TokenMap]:
        """Map the shown pair, and the first question's answers: lowest scale, plain, highest."""
        shown = captured[2 * self.plan.shown_pair : 2 * self.plan.shown_pair + 2]
        maps = [
            self._map(f"A {name} text of the pairs", reply, fitted)
            for name, reply in zip(self.plan.classes, shown, strict=True)
        ]
        question = self.plan.questions[0]
        for scale, reply in zip(self._scales, written[0], strict=True):
            if scale in (0, self._scales[0], self._scales[-1]) and len(reply.token_ids) > 0:
                how = f"steered by {strength(scale)}" if scale else "plain"
                maps.append(self._map(f"“{question}”, answered {how}", reply, fitted))
        return maps

    @property
    def _scales(self) -> list[float]:
        return sorted({0.0, *self.plan.scales})

    def _map(self, title: str, reply: EngineReply, fitted: Directions) -> TokenMap:
        rows = _rows(reply)
        return TokenMap(
            title=title,
            tokens=[self.engine.tokenizer.decode([token]) for token in reply.token_ids],
            cosine=_rounded(fitted.cosine(rows)),
            projection=_rounded(fitted.project(rows)),
        )

    def _run(self, requests: list[Request]) -> list[EngineReply]:
        if not requests:
            return []
        self._check_lengths(requests)
        replies = self.engine.run(requests)
        for request, reply in zip(requests, replies, strict=True):
            if reply.receipt is not None:
                self.receipts.append(RequestReceipt(request.name, reply.receipt))
            elif request.capture or request.push:
                raise ReportError(
                    f"{request.name}: the request captures or steers, but has no receipt"
                )
        return replies

    def _check_lengths(self, requests: list[Request]) -> None:
        most = self.engine.max_length
        for request in requests:
            # An answer is scored after its question, by a request that generates one more token.
            needed = len(request.token_ids) + request.max_tokens + (request.max_tokens > 1)
            if needed > most:
                raise ReportError(
                    f"{request.name}: {needed} tokens, and the engine takes {most}; "
                    "use a larger --max-length, or shorter texts"
                )

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


def _repetition(token_ids: list[int]) -> float | None:
    runs = list(zip(token_ids, token_ids[1:], token_ids[2:], strict=False))
    return 1 - len(set(runs)) / len(runs) if runs else None


def _file_of(save: Callable[[Path], None], name: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        save(path)
        return path.read_bytes()


def _gguf_of(fitted: Directions) -> bytes | None:
    """Return the control vector of all layers but 0, which llama.cpp cannot steer."""
    if importlib.util.find_spec("gguf") is None or len(fitted) < 2:
        return None
    return _file_of(fitted.at(range(1, len(fitted))).to_gguf, "directions.gguf")


def _rows(reply: EngineReply) -> torch.Tensor:
    assert reply.rows is not None, "the request asked for a capture"
    return reply.rows


def _rounded(values: NDArray[np.float32]) -> list[list[float]]:
    """Return nested lists with four decimals, which take a quarter of the bytes of all decimals."""
    return [[round(float(value), 4) for value in row] for row in values]


def _fit_last_rows(captured: list[EngineReply], plan: ReportPlan) -> Directions:
    last = torch.stack([_rows(reply)[:, -1] for reply in captured])
    return Directions.from_rows(last[0::2], last[1::2], folds=plan.num_folds, seed=plan.seed)


def _choose_layer(fitted: Directions, wanted: int | None) -> int:
    num_layers = len(fitted)
    if wanted is None:
        return fitted.best_layer
    if not -num_layers <= wanted < num_layers:
        raise ReportError(f"--layer {wanted}: the model has layers 0 to {num_layers - 1}")
    return wanted % num_layers


def _mean_reading(reply: EngineReply, fitted: Directions, layer: int) -> float:
    """Return the mean projection of all tokens but the first, an attention sink of huge norm."""
    return float(fitted.project(_rows(reply))[layer, 1:].mean())


def _mean_norm(captured: list[EngineReply], layer: int) -> float:
    return float(torch.stack([_rows(reply)[layer, -1] for reply in captured]).norm(dim=-1).mean())
