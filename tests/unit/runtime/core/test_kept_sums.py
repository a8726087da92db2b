"""Sums that a request goes on from are those of its tokens, to the last bit.

A small KV cache, the engine core's record of what is kept, and the sums of a worker. A row is made
of the tokens up to its own. Requests run in chunks and side by side, share prefixes, are preempted
and ended early, and evict each other's blocks and sums.
"""

import random
from operator import itemgetter
from types import SimpleNamespace as Fake
from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from unit.runtime.core.test_scored_blocks import Pool
from unit.runtime.worker.test_reductions import columns_of, encoding_of, segment_of

from midstream.plan.readouts.reduced import SUMS
from midstream.plan.resolved import REDUCING
from midstream.runtime.core.scored_blocks import ScoredBlocks
from midstream.runtime.core.sum_budget import SumBudget
from midstream.runtime.protocol.cache_keys import CacheKeys, KeptScore
from midstream.runtime.protocol.request_payload import RequestPayload
from midstream.runtime.protocol.rpc import DropScores, DropSums
from midstream.runtime.protocol.runs import expand
from midstream.runtime.vllm.kv_cache import KvBlocks
from midstream.runtime.worker.reductions import CountedRows, Reductions, place_of
from midstream.runtime.worker.step.score_cache import ScoreCache
from midstream.runtime.worker.step.sum_cache import SumCache
from midstream.transport.ring_copy import CpuCopy

SIZE, COUNT, SLOTS = 4, 16, 3
BLOCKS = KvBlocks(0, SIZE, COUNT)
WIDTHS = (6, 6, 4, 10)
NUMBERS = sum(WIDTHS)


def row_of(tokens: list[int], position: int) -> Tensor:
    seed = hash(tuple(tokens[: position + 1])) % (1 << 31)
    return 100 * torch.randn(NUMBERS, generator=torch.Generator().manual_seed(seed))


class Running:
    """A request: its two captures reduce other taps, maybe in other ways and at other positions."""

    def __init__(
        self, slot: int, tokens: list[int], kinds: tuple[str, str], ranges: tuple[Any, Any]
    ) -> None:
        self.slot, self.tokens, self.ranges = slot, tokens, ranges
        self.columns = [columns_of(kinds[0], 0, (0, 1)), columns_of(kinds[1], 1, (3,))]
        self.encoding = encoding_of(*self.columns)
        keys = [f"{kind}{mine[:-1]}{mine[-1][0]}" for kind, mine in zip(kinds, ranges, strict=True)]
        self.scores = tuple(
            KeptScore(f"{index}{key}", index, mine, 8 * SUMS[kind] * width)
            for index, (key, kind, mine, width) in enumerate(
                zip(keys, kinds, ranges, (12, 10), strict=True)
            )
        )
        payload = RequestPayload("r", b"", CacheKeys((0,), ("",), None, self.scores))
        ends = range(SIZE, len(tokens) + 1, SIZE)
        self.request = Fake(
            sampling_params=Fake(extra_args={"midstream": payload}),
            block_hashes=[tuple(tokens[:end]) for end in ends],
        )
        self.blocks: list[Any] = []
        self.computed = 0
        self.cap = min(mine[-1][1] - 1 for mine in ranges)

    def pieces(self, start: int, stop: int) -> list[CountedRows]:
        """The rows of a step, those of tokens that both captures count apart from others."""
        chosen = [set(expand(mine).tolist()) for mine in self.ranges]
        pieces = []
        for position in range(start, stop):
            mine = [
                columns
                for columns, selected in zip(self.columns, chosen, strict=True)
                if position in selected
            ]
            if mine:
                encoding = self.encoding if len(mine) == 2 else encoding_of(*mine)
                row = row_of(self.tokens, position)[None]
                last = pieces[-1] if pieces else None
                end = -1 if last is None else last.position + len(last.records)
                if last is not None and end == position and last.encoding == encoding:
                    records = torch.cat([last.records, row])
                    pieces[-1] = CountedRows(last.position, encoding, records)
                else:
                    pieces.append(CountedRows(position, encoding, row))
        return pieces


class Engine:
    """An engine core and a worker, whose copies arrive steps later."""

    def __init__(self, draw: random.Random, most: int) -> None:
        self.draw = draw
        self.pool = Pool()
        self.pool.blocks = [Fake(block_id=index, block_hash=None) for index in range(COUNT)]
        self.pool.free, self.pool.served = list(self.pool.blocks[1:]), []
        self.told: list[Any] = []
        self.scored = ScoredBlocks(BLOCKS, self.told.append)
        self.scored._sums = SumBudget(most)
        self.most = most
        self.table = ScoreCache(lambda: BLOCKS, 1, SIZE * (COUNT - 1))
        self.cache = SumCache(self.table.blocks, lambda values: CpuCopy(values.clone()))
        self.cache.is_on = True
        self.sums = Reductions(60, 6, torch.device("cpu"))
        self.sums.kept = self.cache
        self.running: dict[int, Running] = {}
        self.resumed: set[int] = set()
        self.placed: list[tuple[bool, Running, list[int], int]] = []
        self.step_number = 0
        self.hits = 0

    def schedule(self, mine: Running) -> bool:
        """Give a request blocks for its next tokens; whether there are enough."""
        begins = not mine.blocks
        hit, length = [], 0
        if begins:
            for block_hash in mine.request.block_hashes[: mine.cap // SIZE]:
                cached = self.pool.get_cached_block(block_hash, [0])
                if cached is None:
                    break
                hit += cached
            length = len(hit) * SIZE
            length = self.scored.served(mine.request, mine.scores, self.pool, hit, length)
            del hit[length // SIZE :]
        start = length if begins else mine.computed
        stop = min(start + self.draw.choice([1, 3, 4, 6, 20]), len(mine.tokens))
        lacking = -(-stop // SIZE) - len(hit) - len(mine.blocks)
        if lacking > len([block for block in self.pool.free if block not in hit]):
            return False
        for block in hit:
            block.users = getattr(block, "users", 0) + 1
            if block in self.pool.free:
                self.pool.free.remove(block)
        new = [self.pool.free.pop(0) for _ in range(lacking)]
        for block in new:
            block.block_hash, block.users = None, 1
            if block in self.pool.served:
                self.pool.served.remove(block)
        self.scored.forget(new)
        first = len(mine.blocks)
        mine.blocks += hit + new
        ids = [block.block_id for block in mine.blocks]
        if begins:
            self.hits += length
            self.placed.append((mine.slot in self.resumed, mine, ids, length))
        elif new:
            self.cache.renew(mine.slot, self.table.blocks.extend(mine.slot, (ids[first:],)))
        mine.computed = start
        full = range(start // SIZE, stop // SIZE)
        for index in full:
            mine.blocks[index].block_hash = mine.request.block_hashes[index]
            self.pool.served.append(mine.blocks[index])
        if full:
            filled = [mine.blocks[index] for index in full]
            self.scored.add(mine.request, mine.scores, self.pool, filled, full[0])
        mine.stop = stop  # type: ignore[attr-defined]
        return True

    def free(self, mine: Running) -> None:
        for block in reversed(mine.blocks):
            block.users -= 1
            if not block.users:
                self.pool.free.append(block)
        mine.blocks = []

    def preempt(self, slot: int) -> None:
        if self.running[slot].blocks:
            self.free(self.running[slot])
            self.resumed.add(slot)

    def end(self, slot: int) -> None:
        mine = self.running.pop(slot)
        if mine.blocks:
            self.free(mine)
        self.resumed.discard(slot)
        self.sums.release(slot)
        self.table.release([slot])

    def step(self) -> None:
        scheduled = [mine for mine in self.running.values() if self.schedule(mine)]
        # The worker learns first of new requests, then of those that run again.
        for is_again, mine, ids, length in sorted(self.placed, key=itemgetter(0)):
            self.table.place(mine.slot, mine.scores, (ids,), length)
            self.sums.place(mine.slot, () if is_again else mine.scores, length)
            self.resumed.discard(mine.slot)
        self.placed.clear()
        if not scheduled:
            for slot in self.running:
                self.preempt(slot)
        self.step_number += 1
        batch = Fake(
            computed=np.array([mine.computed for mine in scheduled], np.int64),
            scheduled=np.array([mine.stop - mine.computed for mine in scheduled], np.int64),  # type: ignore[attr-defined]
            request_ids=[str(mine.slot) for mine in scheduled],
        )
        self.cache.reach(batch, int)  # type: ignore[arg-type]
        pieces = {
            mine.slot: found
            for mine in scheduled
            if (found := mine.pieces(mine.computed, mine.stop))  # type: ignore[attr-defined]
        }
        assert self.sums.count(pieces, self.step_number) == {}
        for mine in scheduled:
            mine.computed = mine.stop  # type: ignore[attr-defined]
            if mine.computed >= len(mine.tokens):
                self.check(mine)
                self.end(mine.slot)
        self.cache.carry_out(self.step_number - self.draw.randrange(3))
        self.scored.end_step()
        for message in self.told:
            if isinstance(message, DropSums):
                self.cache.drop(message.blocks)
            else:
                assert isinstance(message, DropScores)
        self.told.clear()

    def check(self, mine: Running) -> None:
        """The sums of a request that never met another one, and whose rows came at once."""
        alone = Reductions(20, 6, torch.device("cpu"))
        alone.acquire(0, [segment_of(mine.encoding)], WIDTHS)
        alone.count({0: mine.pieces(0, len(mine.tokens))}, 1)
        for columns in mine.encoding.patterns:
            place = place_of(mine.encoding, columns)
            (found,) = self.sums.rows([mine.slot], columns, place)
            (expected,) = alone.rows([0], columns, place)
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def random_ranges(draw: random.Random, length: int) -> Any:
    ranges: Any = [
        ((0, length),),
        ((0, length),),
        ((5, length - 1),),
        tuple((start, start + 1) for start in range(1, length, 3)),
        ((2, 3), (6, max(length, 7))),
    ]
    return draw.choice([mine for mine in ranges if 0 <= mine[0][0] < mine[-1][1] <= length])


@given(most=st.sampled_from([1 << 20, 2000, 500, 0]), seed=st.integers(0, 10**9))
def test_sums_that_the_cache_serves_are_those_of_the_tokens(most: int, seed: int) -> None:
    draw = random.Random(seed)
    engine = Engine(draw, most)
    trunks = [[draw.randrange(9) for _ in range(40)] for _ in range(2)]
    for _ in range(40):
        slot = draw.randrange(SLOTS)
        if slot not in engine.running:
            tokens = draw.choice(trunks)[: draw.randrange(7, 41)]
            if draw.random() < 0.3:
                tokens = [*tokens, *(draw.randrange(9) for _ in range(8))]
            kinds = draw.choice(REDUCING), draw.choice(REDUCING)
            ranges = random_ranges(draw, len(tokens)), random_ranges(draw, len(tokens))
            mine = engine.running[slot] = Running(slot, tokens, kinds, ranges)
            engine.sums.acquire(slot, [segment_of(mine.encoding)], WIDTHS)
        elif draw.random() < 0.1:
            engine.end(slot)
        elif draw.random() < 0.15:
            engine.preempt(slot)
        engine.step()
    for slot in list(engine.running):
        engine.end(slot)
    engine.cache.carry_out(engine.step_number)
    sums = engine.scored._sums
    # The worker has what requests may get, and nothing of which the engine core does not know.
    kept = set(engine.cache._sums)
    assert not set(sums._sizes) - kept
    assert not kept - set(sums._sizes) - set(sums._gone)
    assert not engine.cache._arriving
    assert sum(sums._sizes.values()) == sums._live <= most
    engine.sums.check_integrity()


def test_a_budget_forgets_what_was_used_longest_ago() -> None:
    budget = SumBudget(100)
    for block in (1, 2, 3):
        budget.use("a", block, 30)
    budget.use("a", 1, 30)
    assert budget.evict() == []
    budget.use("b", 4, 30)
    assert budget.evict() == [("a", 2)]
    assert budget.nbytes == 120
    budget.forget("a", 3)
    budget.use("a", 2, 30)  # made anew before the workers dropped it
    assert budget.take_dropped() == {"a": [3]}
    assert budget.nbytes == 90
    assert budget.take_dropped() == {}


def test_a_block_that_is_filled_anew_has_no_sums_until_these_are_made() -> None:
    """Also where the request that goes on from them comes first in the step."""
    engine = Engine(random.Random(0), 1 << 20)
    kept = (KeptScore("k", 0, ((0, 20),), 8),)

    def begin(slot: int, ids: list[int], cached: int, stop: int) -> None:
        engine.table.place(slot, kept, (ids,), cached)
        engine.cache.begin(slot, kept, cached)
        computed, scheduled = np.array([cached]), np.array([stop - cached])
        batch = Fake(request_ids=[str(slot)], computed=computed, scheduled=scheduled)
        engine.cache.reach(batch, int)  # type: ignore[arg-type]

    begin(0, [3], 0, SIZE)
    engine.cache.write(0, 0, np.array([SIZE - 1]), torch.ones(1, 2), 1)
    begin(1, [3], 0, SIZE)
    begin(2, [3, 4], SIZE, SIZE + 1)
    assert engine.cache.read(2, 0, SIZE) is None
    engine.cache.write(1, 0, np.array([SIZE - 1]), torch.zeros(1, 2), 2)
    found = engine.cache.read(2, 0, SIZE)
    assert found is not None
    assert found[0] == SIZE
    assert torch.equal(found[1], torch.zeros(2))
