"""An engine that computes nothing, and jobs for it."""

import json
import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from midstream.codecs import parse_codec
from midstream.errors import SpecError
from midstream.lab.jobs import Job
from midstream.lab.jobs.engine import Reply
from midstream.lab.jobs.prompt_tokens import PromptTokens
from midstream.lab.jobs.records import Failed, Record
from midstream.plan import Capture
from midstream.results.activations import Activations
from midstream.results.encoded_rows import Rows
from midstream.results.receipt import Captured, Receipt
from midstream.sinks import Origin

HIDDEN = 8
LAYERS = (0, 2)
ORIGIN = Origin("some/model", "", 4, HIDDEN, "float32", "0.32.0", "0.1.0")


def job(folder: Path, **fields: Any) -> Job:
    """A job on `prompts.jsonl` of a folder, into `acts` of it."""
    known: dict[str, Any] = {
        "model": "some/model", "data": str(folder / "prompts.jsonl"), "out": str(folder / "acts"),
        "capture": Capture(LAYERS, positions="last_prompt"), "flush_seconds": 60.0,
    }  # fmt: skip
    return Job(**(known | fields))


def write_lines(folder: Path, lines: Iterable[Any]) -> Path:
    """A file of JSON lines; what is bytes is written as it is."""
    path = folder / "prompts.jsonl"
    path.write_bytes(
        b"".join(
            (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            for line in lines
        )
    )
    return path


def prompts(count: int) -> list[dict[str, str]]:
    """So many different ones."""
    return [{"text": f"prompt {number}"} for number in range(count)]


def texts(count: int) -> dict[int, str]:
    """Their texts by line."""
    return {n + 1: each["text"] for n, each in enumerate(prompts(count))}


def tokens_of(prompt: Any) -> list[int]:
    """Each byte of a prompt is a token; of a conversation, of its JSON."""
    if isinstance(prompt, PromptTokens):
        return list(prompt.token_ids)
    return list((prompt if isinstance(prompt, str) else json.dumps(prompt)).encode())


def places_of(prompt: Any) -> list[int]:
    """The positions that have rows: those that token ids have with them, else the last one."""
    if isinstance(prompt, PromptTokens) and prompt.positions is not None:
        return [place for start, stop in prompt.positions for place in range(start, stop)]
    return [len(tokens_of(prompt)) - 1]


def _words(prompt: Any) -> str:
    if isinstance(prompt, PromptTokens):
        return ""
    return json.dumps(prompt)


def vector(token: int, position: int, layer: int, width: int = HIDDEN) -> torch.Tensor:
    """The row of a token, [width]."""
    return torch.arange(width) / 8 + token + 300 * position + 0.25 * layer


# Of an engine whose last layer's rows are not as wide as the others'.
WIDE_ORIGIN = replace(ORIGIN, widths={("resid_post", 2): 12})


class FakeEngine:
    """Ends some of what it has at each step, at random; notes lines that came, and most at once."""

    origin = ORIGIN

    def __init__(self, job: Job, window: int = 7, seed: int = 0) -> None:
        self.window = window
        self.added: list[int] = []
        self.most = 0
        self._codec = parse_codec(job.codec)
        self._chance = random.Random(seed)
        self._running: list[Record] = []
        self.stops: threading.Event | None = None
        self.stops_at = 0

    def add(self, record: Record) -> None:
        text = _words(record.prompt)
        if "too long" in text:
            raise SpecError("", "the prompt is too long")
        self.added.append(record.line)
        self._running.append(record)
        self.most = max(self.most, len(self._running))

    def step(self) -> Sequence[Reply | Failed]:
        if self.stops is not None and len(self.added) >= self.stops_at:
            self.stops.set()
        self._chance.shuffle(self._running)
        count = self._chance.randint(0, len(self._running))
        ended, self._running = self._running[:count], self._running[count:]
        return [self._end(record) for record in ended]

    def _end(self, record: Record) -> Reply | Failed:
        text = _words(record.prompt)
        if "dies" in text:
            raise RuntimeError("the engine is dead")
        if "breaks" in text:
            return Failed(record.line, "edits were not applied")
        tokens = tokens_of(record.prompt)
        places = places_of(record.prompt)
        positions = torch.tensor(places)
        rows = {}
        for layer in LAYERS:
            width = self.origin.width(("resid_post", layer))
            values = torch.stack([vector(tokens[at], at, layer, width) for at in places])
            encoded = self._codec.encode(values)
            rows["resid_post", layer] = Rows(
                self._codec, width, torch.float32, (encoded[:, None],), (0,)
            )
        captured = tuple(
            Captured("resid_post", layer, len(places), len(places)) for layer in LAYERS
        )
        return Reply(
            line=record.line,
            prompt=record.prompt if isinstance(record.prompt, str) else text,
            prompt_token_ids=tuple(tokens),
            text="an answer",
            generated_token_ids=(5,),
            finish_reason="length",
            receipt=Receipt("7", len(tokens), 1, captured, None),
            activations=Activations(rows, dict.fromkeys(rows, positions), torch.tensor(tokens)),
        )
