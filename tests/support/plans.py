"""Resolved plans by hand and at random, of every kind of instruction."""

import random

from midstream.ops.layout import Flags, Op
from midstream.plan import (
    Instruction,
    Match,
    ResolvedCapture,
    ResolvedEdit,
    ResolvedPlan,
    ResolvedProbe,
    Steps,
    Vector,
    Where,
)
from midstream.plan.positions.range_set import intersect, subtract
from midstream.plan.positions.ranges import merge
from midstream.runtime.protocol.segments import TapProgramStep
from support.fake_steps import TAPS, VOCABULARY

VECTORS = [Vector.parse([float(n + 1), -1.0, 0.5, 2.0 * n]) for n in range(5)]
SMALL = [Vector.parse([0.25, 0.5, -0.25, 0.125 * n]) for n in range(3)]
MASK = Vector.parse([0.0, 1.0, 1.0, 0.0])
ONE = Flags.FRESH | Flags.COUNTED


def add(vector: Vector = VECTORS[0], scale: float = 1.0) -> tuple[Instruction, ...]:
    """scale · vector is added."""
    return (Instruction(Op.ADD, write=(vector,), a=scale, flags=Flags.COUNTED),)


def probe(vector: Vector = SMALL[0], bias: float = 0.5, slot: int = 0) -> tuple[Instruction, ...]:
    """A score is read."""
    return (Instruction(Op.PROBE, read=vector, a=bias, flags=ONE, slot=slot),)


def rows(count: int, first: int) -> tuple[Instruction, ...]:
    """Tokens at positions `first`, `first` + 1, … get each a row of their own."""
    write = tuple(Vector.parse([float(n), 1.0, -2.0, 0.5]) for n in range(count))
    flags = ONE | Flags.ROW_BY_POSITION
    return (Instruction(Op.REPLACE, write=write, a=1.0, flags=flags, first=first),)


def mapped(matrix: Vector, shift: Vector = VECTORS[0]) -> tuple[Instruction, ...]:
    """h becomes matrix · h + shift; the matrix has its rows one after the other."""
    return (Instruction(Op.MAP, read=matrix, write=(shift,), a=1.0, flags=ONE),)


def gated(
    steps: tuple[Instruction, ...], slot: int | None = None, **params: float
) -> tuple[Instruction, ...]:
    """The same behind a gate: on the stream, or on a score."""
    hard = Flags.NONE if params.get("c") else Flags.STEP
    if slot is None:
        gate = Instruction(Op.GATE, read=SMALL[1], flags=Flags.FRESH | hard, **params)
    else:
        gate = Instruction(Op.GATE, flags=hard, slot=slot, **params)
    return (gate, *(step.with_flags(Flags.GATED) for step in steps))


PLAIN: list[tuple[Instruction, ...]] = [
    add(VECTORS[0], 0.5),
    add(VECTORS[1], -1.0),
    (Instruction(Op.ADD, write=(VECTORS[2],), a=2.0, flags=ONE | Flags.KEEP),),
    (Instruction(Op.ADD_MATCHED, write=(SMALL[0],), a=0.5, flags=ONE),),
    (Instruction(Op.CLIP, read=SMALL[1], write=(SMALL[1],), a=-0.5, b=0.25, c=1.0, flags=ONE),),
    (
        Instruction(Op.LINEAR, read=SMALL[0], write=(VECTORS[3],), a=0.25, flags=Flags.FRESH),
        Instruction(
            Op.LINEAR, read=SMALL[2], write=(SMALL[1],), a=-1.0, b=1.0, flags=Flags.COUNTED
        ),
    ),
    (Instruction(Op.FEATURE, SMALL[2], (VECTORS[1],), 0.25, 0.125, -1.0, 0.5, ONE),),
    (Instruction(Op.REPLACE, write=(VECTORS[4],), a=0.75, flags=ONE),),
    (Instruction(Op.MULTIPLY, write=(SMALL[1],), a=1.0, flags=ONE),),
    (Instruction(Op.RAISE, write=(VECTORS[4],), a=1.0, b=0.015625, flags=ONE, mask=MASK),),
    (Instruction(Op.SCALE, a=1.5, flags=ONE),),
    (Instruction(Op.SCALE, a=0.0, flags=ONE, mask=MASK),),
    (Instruction(Op.REPLACE, write=(VECTORS[4],), a=1.0, flags=ONE | Flags.KEEP, mask=MASK),),
]
KINDS = [
    *PLAIN,
    gated(add(VECTORS[3]), b=0.25),
    gated(PLAIN[7], a=0.5, b=-0.25, c=2.0),
]


def edits_of(
    *given: tuple[int, tuple[Instruction, ...]], **more: object
) -> tuple[TapProgramStep, ...]:
    """A program of (index of the tap, instructions), …"""
    return tuple(TapProgramStep(tap, steps, Steps(steps).digest, **more) for tap, steps in given)


def where_of(where) -> Where:
    """Ranges as a Where."""
    return where if isinstance(where, Where) else Where(tuple(where))


def plan_of(edits=(), captures=(), probes=(), prompt_len: int = 8) -> ResolvedPlan:
    """A plan from ((tap, vector, scale, where) or (tap, instructions, where), …),
    ((taps, where), …) and ((name, tap, where), …), whose slots are numbered.
    """
    found = []
    for source, (tap, *what, where) in enumerate(edits):
        steps = add(*what) if len(what) == 2 else what[0]
        found.append(ResolvedEdit(*tap, Steps(steps), where_of(where), source))
    return ResolvedPlan(
        prompt_len,
        tuple(found),
        tuple(
            ResolvedCapture(tuple(taps), where_of(where), nth)
            for nth, (taps, where) in enumerate(captures)
        ),
        tuple(
            ResolvedProbe(name, *tap, Steps(probe(slot=slot)), where_of(where))
            for slot, (name, tap, where) in enumerate(probes)
        ),
    )


def random_ranges(draw: random.Random, length: int):
    """One to three ranges that do not touch; the last may be endless."""
    places = sorted(draw.sample(range(length + 6), 2 * draw.randint(1, 3)))
    pairs = list(zip(places[::2], places[1::2], strict=True))
    if draw.random() < 0.4:
        pairs[-1] = (pairs[-1][0], None)
    return merge(pairs)


def random_where(draw: random.Random, length: int, prompt_len: int, last: bool = False) -> Where:
    """Positions, with generated tokens by their ids now and then, and the last one of all."""
    ranges = random_ranges(draw, length)
    matches: list[Match] = []
    generated = ((prompt_len, None),)
    free = subtract(generated, ranges)
    for others in (False, True):
        here = intersect(free, random_ranges(draw, length))
        if here and draw.random() < 0.25:
            ids = draw.sample(range(VOCABULARY), draw.randint(1, 3))
            matches.append(Match(here, tuple(sorted(ids)), others))
            free = subtract(free, here)
    if matches and draw.random() < 0.3:
        ranges = ()
    last_from = prompt_len if last and draw.random() < 0.3 else None
    return Where(ranges, tuple(matches), last_from)


def random_plan(draw: random.Random, length: int, taps=tuple(TAPS)) -> ResolvedPlan | None:
    """Some edits, captures and probes anywhere; None now and then."""
    taps = list(taps)
    prompt_len = draw.randint(1, length)
    probes = [
        ResolvedProbe(
            f"p{slot}",
            *draw.choice(taps),
            Steps(probe(draw.choice(SMALL), draw.choice([0.0, 1.0]), slot)),
            random_where(draw, length, prompt_len, last=True),
        )
        for slot in range(draw.choice([0, 0, 1, 2]))
    ]
    edits = []
    for source in range(draw.randint(0, 3)):
        tap, where = draw.choice(taps), random_where(draw, length, prompt_len)
        kind = draw.random()
        if kind < 0.15:
            start = draw.randrange(length)
            count = draw.randint(1, 4)
            where, steps = Where(((start, start + count),)), rows(count, start)
        elif kind < 0.35 and tap != taps[0]:
            # A gate that reads at an earlier tap, for the same tokens.
            slot = len(probes)
            read = Steps(probe(draw.choice(SMALL), 0.25, slot))
            earlier = draw.choice(taps[: taps.index(tap)])
            probes.append(ResolvedProbe("", *earlier, read, where))
            steps = gated(draw.choice(PLAIN), slot, b=0.125, c=draw.choice([0.0, 2.0]))
        else:
            steps = draw.choice(KINDS)
        edits.append(ResolvedEdit(*tap, Steps(steps), where, source))
    captures = tuple(
        ResolvedCapture(
            tuple(sorted(draw.sample(taps, draw.randint(1, min(3, len(taps)))), key=taps.index)),
            random_where(draw, length, prompt_len, last=True),
            nth,
        )
        for nth in range(draw.randint(0, 2))
    )
    if not (edits or captures or probes):
        return None
    return ResolvedPlan(prompt_len, tuple(edits), captures, tuple(probes))
