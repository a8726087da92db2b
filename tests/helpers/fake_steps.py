"""A `Session` driven without an engine: random streams go through the `site` op, step by step,
and a reader of plans that goes row by row says what must come of it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import midstream.ops.site  # noqa: F401  (defines the op)
from midstream.runtime.buffers import Buffers, Tap
from midstream.runtime.requests import APPLIED_0, UNSEEN, Request
from midstream.runtime.session import Session
from midstream.runtime.stepview import StepView
from midstream.spec import ResolvedCapture, ResolvedEdit, ResolvedPlan, Vector
from midstream.transport.host import host_transport

WIDTH = 4
TAPS: dict[Tap, int] = {
    (site, layer): 2 * layer + nth
    for layer in range(3)
    for nth, site in enumerate(("resid_pre", "resid_post"))
}
VECTORS = [Vector.parse([float(n + 1), -1.0, 0.5, 2.0 * n]) for n in range(5)]


def make_buffers(**changes) -> Buffers:
    """Small buffers for TAPS on the CPU."""
    sizes = {
        "taps": list(TAPS),
        "max_tokens": 64,
        "hidden_size": WIDTH,
        "table_rows": 256,
        "max_edits": 1024,
        "bank_rows": 64,
        "ring_rows": 64 * len(TAPS),
        "dtype": torch.float32,
        "device": torch.device("cpu"),
    }
    return Buffers.allocate(**{**sizes, **changes})


class SlowTransport:
    """Rows arrive `lag` steps late, and a step's rows follow those of the step before it."""

    def __init__(self, ring: Tensor, lag: int) -> None:
        self._ring, self._lag = ring, lag
        self._next = 0
        self.shipped = 0

    @property
    def capacity(self) -> int:
        return self._ring.shape[0]

    def reserve(self, num_rows: int) -> int:
        if self._next + num_rows > self.capacity:
            self._next = 0
        return self._next

    def ship(self, first: int, num_rows: int, tally: Tensor) -> SlowShipment:
        self._next = first + num_rows
        self.shipped += 1
        rows = self._ring[first : first + num_rows].clone()
        return SlowShipment(self, self.shipped + self._lag, rows, tally.clone())


@dataclass
class SlowShipment:
    transport: SlowTransport
    due: int
    copied_rows: Tensor
    copied_tally: Tensor

    def ready(self) -> bool:
        return self.transport.shipped >= self.due

    def rows(self) -> Tensor:
        return self.copied_rows

    def tally(self) -> Tensor:
        return self.copied_tally


@dataclass
class Fake:
    """One request, and what the naive reader knows of it.

    Attributes:
        plan: None asks for nothing, and the session never hears of it.
        computed: its tokens before the next step.
        rows: the vectors that must have been captured, by (tap, position); the latest stands.
        done: the state that each position must have.
    """

    id: str
    plan: ResolvedPlan | None = None
    uid: str = ""
    computed: int = 0
    rows: dict[tuple[Tap, int], NDArray[np.float32]] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)

    def note_skipped(self) -> None:
        """Positions that a step begins after were served from the KV cache."""
        self.done += [UNSEEN] * (self.computed - len(self.done))

    def note(self, position: int, edits: int, asked: bool) -> None:
        if position >= len(self.done):
            self.done.append(UNSEEN)
        if asked:
            self.done[position] = APPLIED_0 + edits


class FakeEngine:
    """Runs steps through a session and holds every row of them against the naive reader."""

    def __init__(self, seed: int = 0, lag: int | None = None, max_model_len: int = 64, **sizes):
        self.buffers = make_buffers(**sizes)
        self.transport = (
            host_transport(self.buffers.ring)
            if lag is None
            else SlowTransport(self.buffers.ring, lag)
        )
        self.session = Session(self.buffers, TAPS, self.transport, max_model_len, captures=True)
        self._draw = torch.Generator().manual_seed(seed)

    def add(self, fake: Fake) -> None:
        if fake.plan is not None:
            self.session.add(fake.id, fake.uid or fake.id, fake.plan.to_bytes())

    def take(self, uid: str) -> list[Request]:
        """What the session has of one uid."""
        return self.session.take([uid])[uid]

    def step(self, batch: list[tuple[Fake, int]], pad: int = 0, **firing) -> None:
        """One step of (request, tokens scheduled); `firing` as in `forward`."""
        scheduled = np.array([count for _, count in batch], np.int32)
        computed = np.array([fake.computed for fake, _ in batch], np.int32)
        num_tokens = int(scheduled.sum())
        ids = [fake.id for fake, _ in batch]
        self.session.before_forward(StepView(ids, scheduled, computed, num_tokens))
        before, after = self.forward(num_tokens + pad, **firing)
        self.session.after_forward()
        assert not bool(self.buffers.tokens.any()), "the buffers are still armed"
        row = 0
        for fake, count in batch:
            fake.note_skipped()
            for position in range(fake.computed, fake.computed + count):
                check_row(fake, position, row, before, after)
                row += 1
            fake.computed += count
        for tap in before:
            assert (before[tap][0][row:] == after[tap][row:]).all(), "padding was edited"

    def forward(self, rows: int, skip: tuple[Tap, ...] = (), twice: tuple[Tap, ...] = ()):
        """Every tap's (hidden, residual or None) before the op and hidden after it, as arrays.

        Args:
            rows: rows of the batch, padding included.
            skip: taps that do not fire.
            twice: taps that fire twice.
        """
        before, after = {}, {}
        for tap, index in TAPS.items():
            if tap in skip:
                continue
            hidden = torch.randn(rows, WIDTH, generator=self._draw)
            residual = torch.randn(rows, WIDTH, generator=self._draw) if index % 2 else None
            other = None if residual is None else residual.numpy()
            before[tap] = (hidden.numpy().copy(), other)
            for _ in range(2 if tap in twice else 1):
                self._fire(index, hidden, residual)
            after[tap] = hidden.numpy()
        return before, after

    def _fire(self, index: int, hidden: Tensor, residual: Tensor | None) -> None:
        own = self.buffers
        torch.ops.midstream.site(
            hidden, residual, own.tokens, own.tally, own.table[index],
            own.edit_rows, own.edit_scales, own.bank, own.ring,
        )  # fmt: skip


def check_row(fake: Fake, position: int, row: int, before, after) -> None:
    """What the row's token must have got at every tap; notes what must have been captured.

    Exact: edits apply in order, in float32, as here.
    """
    edits, taps = wanted(fake.plan, position)
    for tap, (hidden, residual) in before.items():
        value = hidden[row]
        for edit in edits.get(tap, ()):
            value = value + np.float32(edit.scale) * edit.vector.numpy()
        assert (after[tap][row] == value).all(), f"{fake.id} at {position}, {tap}"
        if tap in taps:
            fake.rows[tap, position] = value if residual is None else value + residual[row]
    fake.note(position, sum(map(len, edits.values())), bool(edits or taps))


def wanted(plan: ResolvedPlan | None, position: int):
    """({tap: edits}, taps captured) of one position, read off its plan."""
    edits: dict[Tap, list[ResolvedEdit]] = {}
    if plan is None:
        return edits, set()
    for edit in plan.edits:
        if (edit.site, edit.layer) in TAPS and covers(edit.ranges, position):
            edits.setdefault((edit.site, edit.layer), []).append(edit)
    taps = {
        tap
        for capture in plan.captures
        if covers(capture.worker_ranges, position)
        for tap in capture.taps
        if tap in TAPS
    }
    return edits, taps


def covers(ranges, position: int) -> bool:
    return any(start <= position and (stop is None or position < stop) for start, stop in ranges)


def captured(request: Request) -> dict[tuple[Tap, int], NDArray[np.float32]]:
    """The rows that a session kept, by (tap, position)."""
    names = list(TAPS)
    found = {}
    for block in request.blocks:
        for position, record in zip(block.positions.tolist(), block.values.numpy(), strict=True):
            for tap, value in zip(block.taps, record, strict=True):
                assert (names[tap], position) not in found
                found[names[tap], position] = value
    return found


def check_taken(taken: list[Request], fakes: list[Fake]) -> None:
    """What the session has of some requests is what the naive reader has of them."""
    by_id = {request.id: request for request in taken}
    assert set(by_id) == {fake.id for fake in fakes}
    assert len(by_id) == len(taken)
    for fake in fakes:
        request = by_id[fake.id]
        assert request.problem == ""
        assert request.done.tolist() == fake.done
        found = captured(request)
        assert set(found) == set(fake.rows)
        for key, value in fake.rows.items():
            assert (found[key] == value).all(), f"{fake.id}: {key}"


def random_ranges(draw: random.Random, length: int):
    """One to three ranges that do not touch; the last may be endless."""
    places = sorted(draw.sample(range(length + 6), 2 * draw.randint(1, 3)))
    pairs = list(zip(places[::2], places[1::2], strict=True))
    merged = [pairs[0]]
    for start, stop in pairs[1:]:
        if start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    if draw.random() < 0.4:
        merged[-1] = (merged[-1][0], None)
    return tuple(merged)


def random_plan(draw: random.Random, length: int) -> ResolvedPlan | None:
    """Some edits and captures anywhere; None now and then."""
    edits = tuple(
        ResolvedEdit(
            *draw.choice(list(TAPS)),
            draw.choice(VECTORS),
            draw.choice([0.5, 2.0, -1.0]),
            random_ranges(draw, length),
        )
        for _ in range(draw.randint(0, 3))
    )
    prompt_len = draw.randint(1, length)
    captures = tuple(
        ResolvedCapture(
            tuple(sorted(draw.sample(list(TAPS), draw.randint(1, 3)), key=TAPS.__getitem__)),
            random_ranges(draw, length),
            draw.choice([None, None, prompt_len]),
        )
        for _ in range(draw.randint(0, 2))
    )
    return ResolvedPlan(prompt_len, edits, captures) if edits or captures else None


def plan_of(edits=(), captures=(), prompt_len: int = 8) -> ResolvedPlan:
    """A plan from ((tap, vector, scale, ranges), …) and ((taps, ranges), …)."""
    return ResolvedPlan(
        prompt_len,
        tuple(ResolvedEdit(*tap, vector, scale, where) for tap, vector, scale, where in edits),
        tuple(ResolvedCapture(tuple(taps), where) for taps, where in captures),
    )


__all__ = [
    "TAPS",
    "VECTORS",
    "WIDTH",
    "Fake",
    "FakeEngine",
    "SlowTransport",
    "captured",
    "check_taken",
    "make_buffers",
    "plan_of",
    "random_plan",
]
