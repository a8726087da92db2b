"""What gates with memory are, told twice: a plain loop over tokens, and random steps of the op."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midstream import Gate
from midstream.ops import layout
from midstream.ops.layout import Flags, Op

F = np.float32
# A prompt of several blocks of 16 tokens.
LONG = [
    5, 17, 33, 101, 8, 77, 54, 23, 9, 150, 44, 12, 13, 99, 180, 64, 3, 70, 71, 120, 66, 14, 190,
    31, 57, 88, 142, 6, 25, 111, 39, 160, 81, 17, 5, 33, 101,
]  # fmt: skip


def amounts(gate: Gate, scores: Sequence[float]) -> list[float]:
    """What a gate multiplies its edit by at each of the tokens that the edit selects."""
    found: list[float] = []
    average: float | None = None
    is_open, tokens_left = False, 0
    for score in scores:
        if average is None or gate.smooth is None:
            average = float(score)
        else:
            average += gate.smooth * (float(score) - average)
        if gate.sharpness is not None:
            found.append(float(1 / (1 + np.exp(-gate.sharpness * (average - gate.threshold)))))
            continue
        stays = gate.threshold if gate.release is None else gate.release
        if average > gate.threshold or (is_open and average > stays):
            is_open, tokens_left = True, gate.hold if isinstance(gate.hold, int) else 0
        elif is_open and gate.hold != "rest":
            is_open = tokens_left > 0
            tokens_left -= 1
        found.append(1.0 if is_open else 0.0)
    return found


# ---------------------------------------------------------------- steps of the op

WIDTH, UNIT, VOCABULARY, SLOTS = 6, 3, 5, 4
KEPT, DRAFTS = 8, 3
SCANS = 3  # with parameters and a slot each
SITE = -5  # the site's code
ELSEWHERE = 5  # a state of another site


@dataclass(frozen=True)
class Scan:
    """One SCAN: its numbers, and which positions and ids of a request it reads."""

    numbers: tuple[float, float, float, float]  # a, b, c, d
    hold: int
    step: bool
    vector: Tensor
    ids: tuple[int, ...]  # with `others`, which ids it reads; empty: all
    others: bool
    begins: int  # the positions that it reads, and none between `gap` and `gap` + 3
    ends: int
    gap: int
    by_bit: bool  # its tokens have a bit each, so that the op needs no list of ids

    def reads(self, position: int) -> bool:
        """Whether the program of the token at a position has it."""
        inside = self.begins <= position < self.ends
        return inside and not self.gap <= position < self.gap + 3

    def applies(self, token: int) -> bool:
        return not self.ids or (token in self.ids) != self.others


@dataclass
class Request:
    """A request: what is at its positions, as last computed."""

    scans: list[int]
    states: list[int]
    h: list[Tensor]
    ids: list[int]


def random_scan(draw: random.Random) -> Scan:
    opens = draw.choice([-2.0, 0.0, 3.0, 8.0])
    begins = draw.choice([0, 0, 3, 7])
    step = draw.random() < 0.8
    return Scan(
        numbers=(
            draw.choice([0.0, 1.5]),
            opens,
            opens - draw.choice([0.0, 0.0, 4.0, 9.0]),
            draw.choice([1.0, 0.5, 0.25, 0.3]),
        ),
        hold=draw.choice([0, 1, 3, layout.HELD]) if step else 0,
        step=step,
        vector=torch.tensor([float(draw.randint(-2, 2)) for _ in range(WIDTH)]),
        ids=tuple(draw.sample(range(VOCABULARY), 2)) if draw.random() < 0.4 else (),
        others=draw.random() < 0.5,
        begins=begins,
        ends=begins + draw.choice([5, 12, 100]),
        gap=draw.choice([5, 9, 200]),
        by_bit=draw.random() < 0.5,
    )


def expected_score(
    scan: Scan, request: Request, position: int
) -> tuple[np.float32, np.float32, int]:
    """The score at a position and what is remembered after it, from all before it, one after the
    other in float32.
    """
    a, opens, closes, weight = map(F, scan.numbers)
    average, left = F(0), -1
    for at in range(position + 1):
        if not scan.reads(at) or not scan.applies(request.ids[at]):
            continue
        score = F(float(request.h[at] @ scan.vector)) + a
        first = left < 0 or weight == 1
        average = score if first else average + weight * (score - average)
        is_kept = average > (closes if left > 0 else opens)
        left = 1 + scan.hold if is_kept else max(left - 1, 0)
    return F(left > 0) if scan.step else average, average, left


def random_steps(
    seed: int, dtype: torch.dtype = torch.float32, steps: int = 8
) -> Iterator[tuple[list[Any], dict[tuple[int, int], Any]]]:
    """Yield the arguments of the op for one step after the other, and what must be in `scores`
    after it, by row and column, as bits. The states are those that the op left in the step before.

    Requests begin, go on by chunks of prompts or by draft tokens, of which some are rejected, and
    begin again from 0 as after a preemption. Numbers are such that sums are exact.
    """
    draw = random.Random(seed)
    scans = [random_scan(draw) for _ in range(SCANS)]
    requests = [
        Request([0, 2], [0, 3], [], []),
        Request([1], [1], [], []),
        Request([2], [4], [], []),
    ]
    rows = 40
    tokens, table, instructions, params, lists, bank = _tables(scans)
    states = torch.zeros(6, KEPT, layout.STATE_COLUMNS, dtype=torch.int32)
    drafted = [0] * len(requests)
    for _ in range(steps):
        tokens = torch.zeros(rows, layout.TOKEN_COLUMNS, dtype=torch.int32)
        ids = torch.zeros(rows, layout.ID_COLUMNS, dtype=torch.int32)
        hidden, residual = torch.zeros(rows, WIDTH), torch.zeros(rows, WIDTH)
        armed = torch.zeros(6, layout.SCAN_COLUMNS, dtype=torch.int32)
        row, wanted, places = 0, [], {}
        for nth, request in enumerate(requests):
            if draw.random() < 0.25:
                continue
            again = draw.random() < 0.1
            back = len(request.h) if again else draw.randint(0, drafted[nth])
            del request.h[len(request.h) - back :], request.ids[len(request.ids) - back :]
            count = draw.choice([1, 1 + DRAFTS, 11])
            drafted[nth] = min(count - 1, DRAFTS)
            for which, state in zip(request.scans, request.states, strict=True):
                armed[state] = torch.tensor([row, count, 1 + which, SITE])
            # One of another site, which would write other scores.
            armed[ELSEWHERE] = torch.tensor([row, count, 1 + which, SITE + 1])
            for _ in range(count):
                position = len(request.h)
                halves = torch.tensor(
                    [[float(draw.randint(-2, 2)) for _ in range(WIDTH)] for _ in range(2)]
                )
                hidden[row], residual[row] = halves
                request.h.append(halves.sum(0))
                request.ids.append(draw.randrange(VOCABULARY))
                token = request.ids[-1]
                bits = sum(1 << which for which in range(SCANS) if token in scans[which].ids)
                ids[row] = torch.tensor([token, bits])
                has = [which for which in request.scans if scans[which].reads(position)]
                tokens[row, layout.PROGRAM] = 2 + sum(1 << which for which in has)
                tokens[row, layout.POSITION] = position
                wanted += [(row, which, request, position) for which in has]
                state_of = dict(zip(request.scans, request.states, strict=True))
                places |= {(row, which): SLOTS + 2 * state_of[which] for which in has}
                row += 1
        tally = torch.zeros(rows, layout.TALLY_COLUMNS, dtype=torch.int32)
        scores = torch.full((rows, SLOTS + 2 * len(states)), -9.0)
        values: dict[tuple[int, int], Any] = {}
        for at, which, request, position in wanted:
            score, average, left = expected_score(scans[which], request, position)
            place = places[at, which]
            values |= {(at, which): score, (at, place): average}
            values[at, place + 1] = np.int32(left).view(F)
        yield (
            [
                hidden.to(dtype), residual.to(dtype), tokens, ids, tally, table, instructions,
                params, lists, bank, scores, armed, states,
            ],
            values,
        )  # fmt: skip


def _tables(scans: Sequence[Scan]) -> tuple[Tensor, ...]:
    """Programs 2 + bits: an addition, and the SCANs of these bits."""
    words: list[list[int]] = []
    params: list[tuple[float, ...]] = []
    lists: list[int] = [0]
    table = torch.zeros(2 + (1 << len(scans)), layout.TABLE_COLUMNS, dtype=torch.int32)
    table[0, layout.FIRST] = 77  # column EDIT_START of row 0
    table[0, layout.CODE] = SITE
    for bits in range(1 << len(scans)):
        table[2 + bits, layout.EDIT_START] = len(words)
        words.append([int(Op.ADD), 0, 0, 0, int(Flags.COUNTED), 0, 0, 0])
        params.append((0.0, 0.0, 0.0, 0.0))
        for which, scan in enumerate(scans):
            if not bits >> which & 1:
                continue
            flags = Flags.COUNTED
            flags |= Flags.STEP if scan.step else Flags.NONE
            flags |= Flags.OTHER_IDS if scan.others and scan.ids else Flags.NONE
            read = which * (WIDTH // UNIT)
            ids = [len(lists), len(scan.ids)]
            if scan.ids and scan.by_bit:
                ids = [which, layout.BY_BIT]
            words.append([int(Op.SCAN), read, scan.hold, 1 + which, int(flags), *ids, 0])
            params.append(scan.numbers)
            lists += scan.ids
        table[2 + bits, layout.EDIT_COUNT] = len(words) - int(table[2 + bits, layout.EDIT_START])
    bank = torch.stack([scan.vector for scan in scans]).view(-1, UNIT)
    return (
        torch.zeros(0),
        table,
        torch.tensor(words, dtype=torch.int32),
        torch.tensor(params),
        torch.tensor(lists, dtype=torch.int32),
        bank,
    )


def check_steps(run: Callable[..., None], seed: int, dtype: torch.dtype = torch.float32) -> int:
    """Check an implementation of the op on random steps; return how many scores were compared."""
    compared = 0
    for given, wanted in random_steps(seed, dtype):
        scores, tally, hidden = given[10], given[4], given[0].clone()
        run(*given)
        assert torch.equal(given[0], hidden)
        assert not bool(tally.any())
        assert not bool(given[12][ELSEWHERE].any())
        others = torch.ones_like(scores, dtype=torch.bool)
        for (row, column), value in wanted.items():
            found = scores[row, column].numpy()
            assert found == value or found.tobytes() == value.tobytes(), (seed, row, column)
            others[row, column] = False
        assert bool((scores[others] == -9.0).all()), "a score that no row has"
        compared += sum(column < SLOTS for _, column in wanted)
    return compared
