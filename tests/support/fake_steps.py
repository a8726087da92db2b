"""A `WorkerSession` without an engine: random streams pass the `site` op, step by step, and are
compared with a naive reader of plans, row by row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.codecs import parse_codec
from midstream.ops import layout
from midstream.ops.site import bind
from midstream.plan import (
    Instruction,
    ResolvedEdit,
    ResolvedPlan,
    ResolvedProbe,
    Steps,
    Vector,
    Where,
)
from midstream.plan.resolve.wire import to_bytes
from midstream.runtime.protocol.runs import expand_runs
from midstream.runtime.protocol.segments import APPLIED_0, CACHED, UNSEEN, Room
from midstream.runtime.worker.request_state import RequestState
from midstream.runtime.worker.session import StepRules, WorkerSession
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.runtime.worker.step_recorder import RankMemory
from midstream.runtime.worker.tables.device_buffers import Buffers, BufferSizes
from midstream.sites import Tap
from midstream.transport.arena import Arena, Extent
from midstream.transport.base import Parcel, Shipment, Transport
from midstream.transport.ring_copy import host_transport
from support import formulas
from support.stored import make_arena

Array = NDArray[np.float32]
# What a tap is called with: hidden, and the residual or None.
Halves = tuple[Array, Array | None]

T = TypeVar("T", ResolvedEdit, ResolvedProbe)
WIDTH = 4
TAPS: dict[Tap, int] = {
    (site, layer): 2 * layer + nth
    for layer in range(3)
    for nth, site in enumerate(("resid_pre", "resid_post"))
}
# Ids of the tokens that requests are made of.
VOCABULARY = 6
# Other widths of the same taps; their greatest common divisor is 2.
MIXED: dict[Tap, int] = {tap: (4, 10, 6, 4, 2, 16)[index] for tap, index in TAPS.items()}
ROOM = {"bank_rows": 64, "programs": 256, "max_edits": 1024, "token_ids": 64, "probes": 8}


def make_buffers(taps: Sequence[Tap] = tuple(TAPS), **changes) -> Buffers:
    """Small buffers on the CPU."""
    mixed = changes.pop("mixed", False)
    limits = {name: changes.pop(name, size) for name, size in ROOM.items()}
    room = changes.pop("room", None) or Room(**limits, maps=changes.pop("maps", 0))
    sizes = {"max_tokens": 64, "hidden_size": WIDTH, "ring_rows": 64 * len(taps)}
    sizes |= {name: changes.pop(name) for name in (*sizes, "drafts") if name in changes}
    return Buffers.allocate(
        {tap: MIXED[tap] if mixed else WIDTH for tap in taps},
        BufferSizes(room=room, **sizes),
        **{"dtype": torch.float32, "device": torch.device("cpu"), **changes},
    )


def view_of(ids: Sequence[str], scheduled, computed, tokens: Sequence[int] = ()) -> StepBatch:
    """Return a batch; without `tokens`, reading the token ids fails."""

    def token_ids() -> Tensor:
        assert len(tokens) == sum(scheduled), "token ids were asked for"
        return torch.tensor(tokens, dtype=torch.int32)

    counts, done = np.array(scheduled, np.int32), np.array(computed, np.int32)
    return StepBatch(ids, counts, done, int(counts.sum()), token_ids)


class SlowTransport:
    """Rows arrive `lag` steps late, and a step's rows follow those of the step before it."""

    def __init__(self, ring: Tensor, lag: int, arena: Arena) -> None:
        self._inner = host_transport(ring, arena)
        self._lag = lag
        self._next = 0
        self.shipped = 0

    @property
    def capacity(self) -> int:
        return self._inner.capacity

    def reserve(self, num_units: int) -> int:
        if self._next + num_units > self.capacity:
            self._next = 0
        return self._next

    def copy(self, values: Tensor) -> SlowCopy:
        return SlowCopy(values.clone())

    def ship(self, parcels: list[Parcel], tally: Tensor, scores: Tensor) -> SlowShipment:
        for parcel in parcels:
            self._next = parcel.first + parcel.num_units
        self.shipped += 1
        shipment = self._inner.ship(parcels, tally, scores)
        return SlowShipment(self, self.shipped + self._lag, shipment)


@dataclass
class SlowCopy:
    copied: Tensor

    def values(self) -> Tensor:
        return self.copied


@dataclass
class SlowShipment:
    transport: SlowTransport
    due: int
    shipment: Shipment

    @property
    def extents(self) -> tuple[Extent | None, ...]:
        return self.shipment.extents

    def wait(self) -> None:
        pass

    def ready(self) -> bool:
        return self.transport.shipped >= self.due

    def free_staging(self) -> None:
        self.shipment.free_staging()

    def tally(self) -> Tensor:
        return self.shipment.tally()

    def scores(self) -> Tensor:
        return self.shipment.scores()


@dataclass
class Fake:
    """One request, and what the naive reader knows of it."""

    id: str
    plan: ResolvedPlan | None = None  # None asks for nothing, and the session never hears of it
    uid: str = ""
    computed: int = 0  # its tokens before the next step
    # The vectors that must have been captured, by (tap, position); the latest stands.
    rows: dict[tuple[Tap, int], NDArray[np.float32]] = field(default_factory=dict)
    # What the probes must have read, by (slot, position); likewise.
    scores: dict[tuple[int, int], np.float32] = field(default_factory=dict)
    # The positions of which scores must have been kept.
    scored: set[int] = field(default_factory=set)
    done: list[int] = field(default_factory=list)  # the state that each position must have

    def __post_init__(self) -> None:
        self.tokens = random.Random(self.id).choices(range(VOCABULARY), k=100)

    def note_skipped(self) -> None:
        """Positions that a step begins after were served from the KV cache."""
        self.done += [CACHED] * (self.computed - len(self.done))

    def note(self, position: int, edits: int, asked: bool) -> None:
        if position >= len(self.done):
            self.done.append(UNSEEN)
        if asked:
            self.done[position] = APPLIED_0 + edits


class FakeEngine:
    """Runs steps through a session and holds every row of them against the naive reader."""

    def __init__(
        self,
        seed: int = 0,
        lag: int | None = None,
        max_model_len: int = 64,
        arena: Arena | None = None,
        **sizes,
    ):
        self.buffers = make_buffers(**sizes)
        self.arena = arena or make_arena()
        self.transport: Transport | SlowTransport = (
            host_transport(self.buffers.ring, self.arena)
            if lag is None
            else SlowTransport(self.buffers.ring, lag, self.arena)
        )
        self.session = WorkerSession(self.memory, StepRules(max_model_len))
        self._draw = torch.Generator().manual_seed(seed)

    @property
    def memory(self) -> RankMemory:
        """What a session of this engine has."""
        return RankMemory(self.buffers, TAPS, self.transport, self.arena)

    def width(self, tap: Tap) -> int:
        """Width of the vectors at a tap."""
        return self.buffers.width(TAPS[tap]) if tap in TAPS else WIDTH

    def add(self, fake: Fake) -> None:
        if fake.plan is not None:
            fake.plan = fitted(fake.plan, self.width)
            self.session.requests.add(fake.id, fake.uid or fake.id, to_bytes(fake.plan))

    def take(self, uid: str) -> list[RequestState]:
        """What the session has of one uid; the rows are not held any more."""
        return self.take_many([uid])[uid]

    def take_many(self, uids: list[str]) -> dict[str, list[RequestState]]:
        """What the session has of some uids; the rows are not held any more."""
        with self.session.collection.collect(uids) as taken:
            return taken

    def view(self, batch: list[tuple[Fake, int]]) -> StepBatch:
        """Return the step as the session receives it."""
        return view_of(
            [fake.id for fake, _ in batch],
            [count for _, count in batch],
            [fake.computed for fake, _ in batch],
            [token for fake, count in batch for token in fake.tokens[fake.computed :][:count]],
        )

    def step(self, batch: list[tuple[Fake, int]], pad: int = 0, **firing) -> None:
        """One step of (request, tokens scheduled); `firing` as in `forward`."""
        view = self.view(batch)
        self.session.before_forward(view)
        armed = bool(self.buffers.tokens.any())
        captures = bool(self.buffers.tokens[:, layout.RECORD].any())
        assert not captures or bool((self.buffers.table[:, 0, layout.FIRST] >= 0).all())
        before, after = self.forward(view.num_tokens + pad, **firing)
        scores = self.buffers.scores.numpy().copy()
        self.session.after_forward()
        assert bool(self.buffers.tokens.any()) == armed
        assert not captures or bool((self.buffers.table[:, 0, layout.FIRST] < 0).all())
        self.session.check_integrity()
        row, asked = 0, False
        for fake, count in batch:
            fake.note_skipped()
            for position in range(fake.computed, fake.computed + count):
                asked |= check_row(fake, position, row, before, after, scores)
                row += 1
            fake.computed += count
        assert armed or not asked
        for tap in before:
            assert _is_same(before[tap], after[tap], slice(row, None)), "padding was edited"

    def forward(self, rows: int, skip: tuple[Tap, ...] = (), twice: tuple[Tap, ...] = ()):
        """Every tap's (hidden, residual or None) before the op and after it, as arrays."""
        before, after = {}, {}
        for tap, index in TAPS.items():
            if tap in skip:
                continue
            width = self.width(tap)
            hidden = torch.randn(rows, width, generator=self._draw)
            residual = torch.randn(rows, width, generator=self._draw) if index % 2 else None
            before[tap] = _copied(hidden), None if residual is None else _copied(residual)
            for _ in range(2 if tap in twice else 1):
                self._fire(index, hidden, residual)
            after[tap] = hidden.numpy(), None if residual is None else residual.numpy()
        return before, after

    def _fire(self, index: int, hidden: Tensor, residual: Tensor | None) -> None:
        table = self.buffers.table[index]
        bind(table, self.buffers, hidden.shape[1])
        torch.ops.midstream.site(hidden, residual, table, self.buffers.tally)


def fitted(plan: ResolvedPlan, width: Callable[[Tap], int]) -> ResolvedPlan:
    """Return a plan whose vectors are as wide as their taps: repeated, or cut."""

    def fit(part: T) -> T:
        size = width((part.site, part.layer))
        steps = tuple(
            replace(
                step,
                read=None if step.read is None else _resized(step.read, size),
                write=tuple(_resized(vector, size) for vector in step.write),
                mask=None if step.mask is None else _resized(step.mask, size),
            )
            for step in part.steps.instructions
        )
        return replace(part, steps=Steps(steps))

    edits, probes = tuple(map(fit, plan.edits)), tuple(map(fit, plan.probes))
    return replace(plan, edits=edits, probes=probes)


def _resized(vector: Vector, size: int) -> Vector:
    return Vector.parse(np.resize(vector.numpy(), size))


def _copied(half: Tensor) -> Array:
    return half.numpy().copy()


def _stream(halves: Halves, row: int) -> Array:
    hidden, residual = halves
    return hidden[row] if residual is None else hidden[row] + residual[row]


def _is_same(before: Halves, after: Halves, row: int | slice) -> bool:
    pairs = zip(before, after, strict=True)
    return all(old is None or bool((old[row] == new[row]).all()) for old, new in pairs)


def check_row(fake: Fake, position: int, row: int, before, after, scores) -> bool:
    """Whether the row's token asks for anything, after holding what it got at every tap, to
    rounding, against its plan. Notes what must have been captured, counted and scored.
    """
    plan, token = fake.plan, fake.tokens[position]
    if plan is None:
        for tap in before:
            assert _is_same(before[tap], after[tap], row), f"{fake.id} at {position} asks nothing"
        fake.note(position, 0, False)
        return False
    done, read = 0, {}
    for tap in before:
        steps, count = applied(plan, tap, position, token)
        done += count
        entered, found = _stream(before[tap], row), _stream(after[tap], row)
        value = formulas.run(steps, entered, read, np.array(position))
        place = f"{fake.id} at {position}, {tap}"
        if any(step.writes for step in map(_Kind, steps)):
            error = np.abs(found - value).max() / max(1, np.abs(value).max())
            assert error < 1e-4, f"{place} is off by {error}"
        else:
            assert _is_same(before[tap], after[tap], row), f"{place} was edited"
        # The captured vector is the stream that the next layer reads.
        if captures_at(plan, tap, position):
            fake.rows[tap, position] = found
    for slot, score in read.items():
        assert abs(scores[row, slot] - score) < 1e-4 * max(1, abs(score)), f"{fake.id}, {position}"
    for probe in plan.probes:
        if probe.name and covers(probe.where.possible, position):
            fake.scored.add(position)
            if (probe.site, probe.layer) in TAPS:
                fake.scores[probe.slot, position] = scores[row, probe.slot]
    asked = any(
        covers(part.where.possible, position) and (set(taps) & set(before))
        for part, taps in _parts(plan)
    )
    fake.note(position, done, asked)
    return asked


class _Kind:
    """Whether an instruction may change the stream."""

    def __init__(self, step: Instruction) -> None:
        self.writes = step.op not in (layout.Op.GATE, layout.Op.PROBE)


def _parts(plan: ResolvedPlan):
    for each in (*plan.edits, *plan.probes):
        yield each, ((each.site, each.layer),)
    for capture in plan.captures:
        yield capture, capture.taps


def applied(
    plan: ResolvedPlan, tap: Tap, position: int, token: int
) -> tuple[list[Instruction], int]:
    """(the instructions that one token gets at a tap, how many of them count)."""
    steps: list[Instruction] = []
    for edit in plan.edits:
        if (edit.site, edit.layer) == tap and applies(edit.where, position, token):
            steps += edit.steps.instructions
    for probe in plan.probes:
        if (probe.site, probe.layer) == tap and covers(probe.where.possible, position):
            steps += probe.steps.instructions
    return steps, sum(step.counted for step in steps)


def applies(where: Where, position: int, token: int) -> bool:
    """Return whether an edit applies to a token."""
    return covers(where.ranges, position) or any(
        covers(match.ranges, position) and (token in match.ids) != match.others
        for match in where.matches
    )


def captures_at(plan: ResolvedPlan, tap: Tap, position: int) -> bool:
    """Whether the worker keeps a row."""
    return any(
        tap in capture.taps and covers(capture.where.possible, position)
        for capture in plan.captures
    )


def covers(ranges, position: int) -> bool:
    return any(start <= position and (stop is None or position < stop) for start, stop in ranges)


def captured(request: RequestState) -> dict[tuple[Tap, int], NDArray[np.float32]]:
    """The rows that a session kept, by (tap, position)."""
    found = {}
    for key, encoded in _encoded(request, lambda _: WIDTH).items():
        found[key] = encoded.view(torch.float32).numpy()
    return found


def _encoded(request: RequestState, width: Callable[[Tap], int]) -> dict[tuple[Tap, int], Tensor]:
    """The encoded rows that a session kept, by (tap, position)."""
    names = list(TAPS)
    codec = parse_codec(request.plan.codec)
    found = {}
    for block in request.blocks:
        taps = [names[tap] for tap in block.taps]
        sizes = [codec.row_bytes(width(tap), torch.float32) for tap in taps]
        records = block.values.reshape(block.positions.size, -1)
        for position, record in zip(block.positions.tolist(), records, strict=True):
            for tap, row in zip(taps, record.split(sizes), strict=True):
                assert (tap, position) not in found
                found[tap, position] = row
    return found


def scored(request: RequestState) -> dict[int, NDArray[np.float32]]:
    """The scores that a session kept, [slots] by position."""
    found = {}
    for rows in request.scores:
        for position, record in zip(expand_runs(rows.spans).tolist(), rows.values, strict=True):
            assert position not in found
            found[position] = record
    return found


def check_taken(
    taken: list[RequestState], fakes: list[Fake], width: Callable[[Tap], int] = lambda _: WIDTH
) -> None:
    """What the session has of some requests is what the naive reader has of them."""
    by_id = {request.id: request for request in taken}
    assert set(by_id) == {fake.id for fake in fakes}
    assert len(by_id) == len(taken)
    for fake in fakes:
        request = by_id[fake.id]
        assert request.problem == ""
        assert request.done.tolist() == fake.done
        found, codec = _encoded(request, width), parse_codec(request.plan.codec)
        assert set(found) == set(fake.rows)
        for key, value in fake.rows.items():
            wanted = codec.encode(torch.from_numpy(value)[None])[0]
            assert torch.equal(found[key], wanted), f"{fake.id}: {key}"
        scores = scored(request)
        assert set(scores) == fake.scored
        for (slot, position), score in fake.scores.items():
            assert scores[position][slot] == score, f"{fake.id}: slot {slot} at {position}"


__all__ = [
    "TAPS",
    "VOCABULARY",
    "WIDTH",
    "Fake",
    "FakeEngine",
    "SlowTransport",
    "applies",
    "captured",
    "captures_at",
    "check_taken",
    "covers",
    "make_buffers",
    "scored",
    "view_of",
]
