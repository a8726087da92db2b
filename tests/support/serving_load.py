"""Load of many clients, each with its own plans, and checks of their responses."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from midstream import AsyncClient, Capture, Probe, Steer
from midstream.client import ServedOutput
from support.serving import NAME
from support.serving_offline import LAYERS, VECTOR

HIDDEN = 576
CODECS = ("raw", "raw", "full8", "topk8:k=16")


@dataclass(slots=True)
class Report:
    """Results of a load."""

    completions: int = 0  # that asked for something, and were what they should be
    wrong: list[str] = field(default_factory=list)  # what was not, in words
    # How long each of the plain requests took.
    plain_seconds: list[float] = field(default_factory=list)
    # (seconds since the start, bytes of each of the server's processes) now and then
    memory: list[tuple[float, list[int]]] = field(default_factory=list)

    @property
    def plain_median(self) -> float:
        """Of the plain requests, in seconds."""
        return sorted(self.plain_seconds)[len(self.plain_seconds) // 2]

    def growth(self) -> list[int]:
        """By how many bytes each of the processes grew since a third of the time, when what is
        used again and again is there.
        """
        early = self.memory[len(self.memory) // 3][1]
        return [last - first for first, last in zip(early, self.memory[-1][1], strict=True)]


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request, drawn at random."""

    words: int
    tokens: int
    layers: tuple[int, ...]
    codec: str
    how: str
    streams: bool
    steered: bool
    probed: bool

    @staticmethod
    def draw(rng: random.Random) -> Wanted:
        """Any."""
        return Wanted(
            words=rng.randint(1, 40),
            tokens=rng.randint(1, 6),
            layers=tuple(sorted(rng.sample(range(LAYERS), rng.randint(1, 4)))),
            codec=rng.choice(CODECS),
            how=rng.choice(("handle", "inline", "none")),
            streams=rng.random() < 0.5,
            steered=rng.random() < 0.5,
            probed=rng.random() < 0.5,
        )

    @property
    def bare(self) -> dict[str, Any]:
        """The arguments of the call that are vLLM's."""
        return {
            "model": NAME,
            "prompt": " two" * self.words,
            "max_tokens": self.tokens,
            "ignore_eos": True,
            "temperature": 0,
        }

    @property
    def given(self) -> dict[str, Any]:
        """All of them."""
        asked: dict[str, Any] = {"capture": Capture(self.layers, codec=self.codec)}
        if self.steered:
            asked["steer"] = Steer(VECTOR, self.layers[0], 0.01 * self.words)
        if self.probed:
            asked["probes"] = Probe(VECTOR, self.layers[-1], name="p")
        return {**self.bare, "activations": self.how, **asked}

    def complaints(self, found: ServedOutput) -> list[str]:
        """What of an answer is not as it should be."""
        [one] = found.outputs
        receipt, rows = one.receipt, self.words + self.tokens - 1
        if receipt is None or receipt.status != "ok":
            return [f"{self}: {receipt}"]
        said = (receipt.prompt_tokens, receipt.generated_tokens)
        wrong = [] if said == (self.words, self.tokens) else [f"{self}: {said}"]
        taps = [("resid_post", layer, rows, rows) for layer in self.layers]
        told = [(one.site, one.layer, one.expected, one.actual) for one in receipt.captured]
        wrong += [] if told == taps else [f"{self}: captured {told}"]
        edits = 0 if receipt.edited is None else receipt.edited.applied + receipt.edited.cached
        wrong += [] if edits == (rows if self.steered else 0) else [f"{self}: {edits} edits"]
        if self.probed and (one.probes is None or len(one.probes["p"]) != rows):
            wrong.append(f"{self}: probes {one.probes}")
        if self.how == "none":
            return wrong if one.activations is None else [*wrong, f"{self}: unasked rows"]
        if one.activations is None:
            return [*wrong, f"{self}: no rows"]
        for layer in self.layers:
            values = one.activations["resid_post", layer]
            positions = one.activations.positions_of("resid_post", layer)
            if values.shape != (rows, HIDDEN) or not bool(torch.isfinite(values).all()):
                wrong.append(f"{self}: rows {values.shape} of layer {layer}")
            if positions.tolist() != list(range(rows)):
                wrong.append(f"{self}: positions {positions.tolist()} of layer {layer}")
        return wrong


async def load(
    url: str,
    clients: int,
    seconds: float,
    least: int,
    memory: Callable[[], list[int]],
    asks: bool = True,
) -> Report:
    """Has many clients ask at once."""
    report, began = Report(), time.monotonic()
    over = asyncio.Event()

    async def one(http: AsyncClient, number: int) -> None:
        rng, made = random.Random(number), 0
        while made < least or time.monotonic() - began < seconds:
            wanted = Wanted.draw(rng)
            given = wanted.given if asks else wanted.bare
            if wanted.streams:
                async for each in http.stream(**given):
                    found = each
            else:
                found = await http.complete(**given)
            wrong = wanted.complaints(found) if asks else []
            report.wrong += wrong
            report.completions += not wrong
            made += 1

    async def plain(http: AsyncClient) -> None:
        while not over.is_set():
            start = time.monotonic()
            await http.complete(" two two", model=NAME, max_tokens=2, temperature=0)
            report.plain_seconds.append(time.monotonic() - start)

    async def watch() -> None:
        while not over.is_set():
            report.memory.append((time.monotonic() - began, memory()))
            await asyncio.sleep(1)

    async with AsyncClient(url) as http:
        beside = [asyncio.create_task(plain(http)), asyncio.create_task(watch())]
        await asyncio.gather(*(one(http, number) for number in range(clients)))
        over.set()
        await asyncio.gather(*beside)
    return report
