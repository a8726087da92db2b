"""Logits of captured rows: the head, and ranks that must call it together."""

from __future__ import annotations

import copy
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fake_steps import TAPS, WIDTH, Fake, FakeEngine
from support.nightly import rounds
from support.plans import plan_of, random_plan, random_ranges, where_of
from support.stored import SEGMENT, make_arena
from torch import Tensor

from midstream.plan import ResolvedCapture, ResolvedPlan
from midstream.plan.positions.ranges import merge
from midstream.plan.resolved import Pattern
from midstream.runtime.protocol.segments import RankShare
from midstream.runtime.worker.rank_agreement import RankLinks
from midstream.runtime.worker.readouts.head_adapters import HeadAdapters
from midstream.runtime.worker.readouts.logits import Head, LogitReader, largest
from midstream.runtime.worker.readouts.reader import PatternReader
from midstream.runtime.worker.session import StepRules, WorkerSession

VOCABULARY, PADDED = 11, 14
LENS = 7  # numbers of a row of two tokens and one of a lens
NORM = ("resid_post", 2)  # stands for the exit of the final norm
WEIGHTS = torch.randn(WIDTH, PADDED, generator=torch.Generator().manual_seed(1))


ROWS = np.arange(5)


def head(hidden: Tensor) -> Tensor:
    return hidden @ WEIGHTS


@pytest.mark.parametrize("columns", [9, VOCABULARY, PADDED])
def test_a_head_returns_the_logits_of_the_vocabulary_whatever_the_model_pads_or_lacks(columns):
    found = Head(lambda hidden: head(hidden)[:, :columns].bfloat16(), VOCABULARY)(
        torch.eye(WIDTH), ROWS
    )
    assert found.shape == (WIDTH, VOCABULARY)
    assert found.dtype == torch.float32
    known = min(columns, VOCABULARY)
    assert torch.equal(found[:, :known], WEIGHTS[:, :known].bfloat16().float())
    assert (found[:, known:] == -torch.inf).all()
    assert Head(lambda hidden: None, VOCABULARY)(torch.eye(WIDTH), ROWS) is None


@pytest.mark.parametrize(("workspace", "sizes"), [(1, [1] * 5), (2 * 12 * VOCABULARY, [2, 2, 1])])
def test_a_head_takes_no_more_rows_at_a_time_than_its_workspace_has_room_for(workspace, sizes):
    rows = torch.randn(5, WIDTH)
    found = list(
        Head(head, VOCABULARY).in_parts(ROWS, lambda first, stop: rows[first:stop], workspace)
    )
    assert [len(logits) for _, logits in found] == sizes
    assert [first for first, _ in found] == [sum(sizes[:nth]) for nth in range(len(sizes))]
    torch.testing.assert_close(torch.cat([each for _, each in found]), head(rows)[:, :VOCABULARY])


class Processor:
    """The parts of vLLM's `LogitsProcessorWithLoRA` that `HeadAdapters` uses; two slots."""

    def __init__(self):
        self.punica_wrapper = SimpleNamespace(token_lora_indices=torch.tensor([1, -1, 0, 1, 1]))
        self.a, self.b = torch.zeros(2, 1, 2, WIDTH), torch.zeros(2, 1, VOCABULARY, 2)

    def set_lora(self, index: int, lora_a: Tensor, lora_b: Tensor) -> None:
        self.reset_lora(index)
        self.a[index, 0], self.b[index, 0] = lora_a, lora_b

    def reset_lora(self, index: int) -> None:
        self.a[index] = self.b[index] = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.punica_wrapper.add_lora_logits(head(hidden), hidden, self.a, self.b, 1.0)


def test_each_row_gets_the_adapter_of_its_own_request_as_they_come_and_go(monkeypatch):
    monkeypatch.setattr("vllm.lora.layers.logits_processor.LogitsProcessorWithLoRA", Processor)
    processor = Processor()
    wrapper = processor.punica_wrapper
    adapters = HeadAdapters(SimpleNamespace(modules=lambda: [processor, Head]))  # type: ignore[arg-type]
    own = Head(processor, VOCABULARY, adapters)
    rows, hidden = np.array([4, 1, 2]), torch.randn(3, WIDTH)
    hidden[1, 0] = torch.inf  # is nobody else's
    plain = Head(head, VOCABULARY)(hidden, rows)
    assert torch.equal(own(hidden, rows), plain)
    matrices = torch.randn(2, WIDTH), torch.randn(VOCABULARY, 2)
    processor.set_lora(1, *matrices)
    added = matrices[1] @ matrices[0] @ hidden[0]
    found = own(hidden, rows)
    torch.testing.assert_close(found[0], plain[0] + added)
    torch.testing.assert_close(found[1:], plain[1:], rtol=0, atol=0, equal_nan=True)
    processor.set_lora(1, *(each * 2 for each in matrices))
    torch.testing.assert_close(own(hidden, rows)[0], plain[0] + 4 * added)
    processor.reset_lora(1)
    assert torch.equal(own(hidden[[0, 2]], rows[[0, 2]]), plain[[0, 2]])
    assert processor.punica_wrapper is wrapper


class Rank(FakeEngine):
    """One rank of two; a call of the head ends when both have made it, with the same vectors."""

    def __init__(self, rank: int, together: Together, **sizes):
        super().__init__(**sizes)
        logits = LogitReader(Head(self._head, VOCABULARY), 400, torch.tanh)  # type: ignore[arg-type]
        patterns = PatternReader(None, None, 400, logits)  # type: ignore[arg-type]
        self.session = WorkerSession(
            self.memory, StepRules(64),
            RankLinks(
                RankShare(rank, 2), agree=lambda mine: together.meet(rank, "agree", mine, all)
            ),
            patterns,
        )  # fmt: skip
        self._rank, self._together = rank, together

    def _head(self, hidden: Tensor) -> Tensor | None:
        self._together.meet(self._rank, "head", hidden.clone(), _the_same)
        return head(hidden)


class Together:
    """What two threads do at the same time; it fails where they would wait for each other."""

    def __init__(self):
        self.calls = 0
        self._given = [None, None]
        self._barrier = threading.Barrier(2, timeout=10)

    def meet(self, rank, what, value, join):
        self._given[rank] = what, value
        self._barrier.wait()
        (here, mine), (there, other) = self._given
        self._barrier.wait()
        assert here == there
        self.calls += rank
        return join([mine, other])


def _the_same(given: list[Tensor]) -> None:
    assert torch.equal(*given)


def random_logits(draw: random.Random, length: int) -> ResolvedPlan:
    """A plan with logits, and often with edits, probes and vectors, which ranks may share."""
    plan = (draw.random() < 0.6 and random_plan(draw, length)) or plan_of()
    kind = draw.choice(["logits_top", "logits_of", "logits_all"])
    keys = merge((token, token + 1) for token in draw.sample(range(VOCABULARY), 3))
    size = {"logits_top": 7, "logits_of": 4, "logits_all": VOCABULARY + 1}[kind]
    pattern = Pattern(kind, size, keys if kind == "logits_of" else (), (), (NORM,), (1,))
    where = where_of(random_ranges(draw, length))
    # The vectors tell what the logits must be.
    captures = (ResolvedCapture((NORM,), where, 0), *plan.captures)
    captures = (*captures, ResolvedCapture((("logits", 2),), where, len(captures), pattern))
    if draw.random() < 0.5:
        taps = tuple((f"lens.{draw.choice('ab')}", layer) for layer in (0, 1))
        reads = tuple(("resid_post", layer) for layer in (0, 1))
        pattern = Pattern("lens", LENS, ((3, 4),), (), reads, (1, 1))
        where = where_of(random_ranges(draw, length))
        captures = (*captures, ResolvedCapture(taps, where, len(captures), pattern))
    return replace(plan, captures=captures, sharded=draw.random() < 0.5)


def assert_logits(state) -> int:
    """The logits of a request are those of the vectors that were captured with them."""
    (capture,) = [each for each in state.plan.captures if each.taps[0][0] == "logits"]
    kind, count = capture.pattern.kind, 0
    names = list(TAPS)
    for block in state.blocks:
        records = block.values.reshape(block.positions.size, -1)
        taps = [names[tap] for tap in block.taps]
        numbers = records.view(torch.float32)
        begin = len(taps) * WIDTH
        end = begin + capture.pattern.size
        if NORM not in taps or numbers.shape[1] - begin in (0, 2 * LENS):  # of a lens alone
            continue
        at = taps.index(NORM) * WIDTH
        expected = head(numbers[:, at : at + WIDTH])[:, :VOCABULARY]
        row, total = numbers[:, begin : end - 1], numbers[:, end - 1]
        torch.testing.assert_close(total, expected.logsumexp(-1))
        if kind == "logits_top":
            ids = row[:, :3].contiguous().view(torch.int32).long()
            torch.testing.assert_close(expected.topk(3).values, expected.gather(1, ids))
            row, expected = row[:, 3:], expected.gather(1, ids)
        elif kind == "logits_of":
            chosen = [token for first, stop in capture.pattern.keys for token in range(first, stop)]
            expected = expected[:, chosen]
        torch.testing.assert_close(row, expected)
        count += len(row)
    return count


@pytest.mark.parametrize("seed", range(rounds(suite=1, nightly=12)))
def test_ranks_call_the_head_together_whatever_each_one_drops_or_cannot_run(seed):
    """Each rank is a thread, with an arena and tables of its own size. A rank that left out a call
    of the head, or called it with other rows, would make the other wait in vain.
    """
    together = Together()
    sizes = [{"programs": 12 if seed % 2 else 256}, {"programs": 256 if seed % 2 else 12}]
    pools = [ThreadPoolExecutor(1) for _ in range(2)]
    arenas = [make_arena(2 * SEGMENT, "drop"), make_arena(SEGMENT, "drop")]
    ranks = [
        Rank(nth, together, arena=arenas[nth], ring_rows=64 * 8, **sizes[nth]) for nth in range(2)
    ]

    def both(do):
        """Call `do` with each rank at the same time; return both results."""
        return [each.result(20) for each in [pools[n].submit(do, ranks[n], n) for n in range(2)]]

    draw = random.Random(seed)
    running: list[tuple[Fake, Fake]] = []
    failed = compared = dropped = 0
    for nth in range(60):
        if len(running) < 6 and draw.random() < 0.6:
            plan = random_logits(draw, 30) if draw.random() < 0.7 else random_plan(draw, 30)
            pair = tuple(Fake(f"r{nth}", copy.copy(plan)) for _ in range(2))
            running.append(pair)  # type: ignore[arg-type]
            both(lambda rank, n, pair=pair: rank.add(pair[n]))
        batch = [(pair, draw.randint(1, 9)) for pair in running if draw.random() < 0.8]
        draw.shuffle(batch)
        batch = [(pair, min(count, 40 - pair[0].computed)) for pair, count in batch]
        batch = [(pair, count) for pair, count in batch if count > 0]

        def step(rank, n, batch=batch):
            view = rank.view([(pair[n], count) for pair, count in batch])
            rank.session.before_forward(view)
            rank.forward(view.num_tokens)
            rank.session.after_forward()

        if batch:
            both(step)
        for pair, count in batch:
            for fake in pair:
                fake.computed += count
                if draw.random() < 0.01:  # preempted
                    fake.computed = 0
            pair[1].computed = pair[0].computed
        for pair in list(running):
            if pair[0].computed >= 40 or draw.random() < 0.03:  # ended, or aborted
                running.remove(pair)
                both(lambda rank, n, pair=pair: rank.session.requests.finish([pair[n].id]))
                mine, theirs = both(lambda rank, n, pair=pair: rank.take(pair[n].id))
                if mine and any(one.pattern for one in pair[0].plan.captures):
                    assert bool(mine[0].problem) == bool(theirs[0].problem)
                    failed += bool(mine[0].problem)
                    dropped += mine[0].dropped
                    compared += 0 if mine[0].problem else assert_logits(mine[0])
                    assert all(
                        block.values.reshape(-1).numel()
                        == block.positions.size * len(block.taps) * WIDTH * 4
                        for block in theirs[0].blocks
                    ), "the second rank returned logits"
    for pool in pools:
        pool.shutdown()
    assert together.calls > 30
    assert failed
    assert dropped
    assert compared > 30


@pytest.mark.parametrize("vocabulary", [5, 199, 4096, 50257, 128256])
@pytest.mark.parametrize("count", [0, 1, 5, 32])
def test_the_largest_logits_are_those_of_topk(vocabulary: int, count: int) -> None:
    if count > vocabulary:
        return
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(count))
    logits[1, -1] = 99.0  # in a block that is not whole
    logits[2, :7] = -torch.inf
    values, ids = largest(logits, count)
    expected = logits.topk(count, -1)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)
