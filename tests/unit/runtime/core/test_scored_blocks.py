"""What the cache serves has every score that a request asks for, and each is that of its tokens.

A small KV cache beside a table of every score that there is: a score is the hash of the tokens up
to its own, and of its probe. Requests share prefixes, and evict each other's blocks.
"""

import random
from types import SimpleNamespace as Fake
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from midstream.runtime.core.scored_blocks import ScoredBlocks, most_scores
from midstream.runtime.protocol.cache_keys import CacheKeys, KeptScore
from midstream.runtime.protocol.request_payload import RequestPayload
from midstream.runtime.protocol.rpc import BlankScores
from midstream.runtime.vllm.kv_cache import KvBlocks
from midstream.runtime.worker.step.score_cache import ScoreCache
from midstream.transport.ring_copy import ScoreLog

SIZE, COUNT, COLUMNS = 4, 12, 5
BLOCKS = KvBlocks(0, SIZE, COUNT)


def true_score(tokens: list[int], position: int, key: str) -> float:
    return float(np.float32(hash((tuple(tokens[: position + 1]), key)) % 9973))


class Pool:
    """vLLM's block pool: the block that was freed first is taken first, and of blocks of one
    content the first one is served.
    """

    def __init__(self) -> None:
        self.blocks = [Fake(block_id=index, block_hash=None) for index in range(COUNT)]
        self.free = list(self.blocks[1:])

    def get_cached_block(self, block_hash: Any, groups: list[int]) -> list[Any] | None:
        assert groups == [0]
        cached = [block for block in self.served if block.block_hash == block_hash]
        return cached[:1] or None

    served: list[Any] = []


class Engine:
    """An engine core and a worker that run one request after the other."""

    def __init__(self, most: int | None = None, unscored: Any = "compute") -> None:
        self.pool = Pool()
        self.pool.served = []
        self.cache = ScoreCache(lambda: BLOCKS, COLUMNS, SIZE * (COUNT - 1))
        self.scored = ScoredBlocks(BLOCKS, self.tell, unscored)
        if most is not None:
            self.scored._most = most
        self.log = ScoreLog()
        self.step = 0
        self.dropped: list[str] = []
        # (block, key, token) of what was computed and not forgotten since.
        self.computed: set[tuple[int, str, int]] = set()
        self.unscored = 0

    def tell(self, message: Any) -> None:
        self.cache.settle(self.step)
        if isinstance(message, BlankScores):
            self.cache.blank(message.key, message.blocks, message.tokens)
            return
        self.cache.drop(message.keys)
        self.dropped += message.keys
        self.computed = {part for part in self.computed if part[1] not in message.keys}

    def run(
        self, tokens: list[int], scores: tuple[KeptScore, ...], chunk: int, together: bool = False
    ) -> int:
        """Run a request, in the step of the one before if `together`; check the scores of what the
        cache serves it, and return how much.
        """
        if not together:
            self.scored.end_step()
        hashes = [tuple(tokens[: end + SIZE]) for end in range(0, len(tokens) - SIZE + 1, SIZE)]
        payload = RequestPayload("r", b"", CacheKeys((0,), ("",), None, scores))
        params = Fake(extra_args={"midstream": payload})
        request = Fake(sampling_params=params, block_hashes=hashes)
        hit = []
        for block_hash in hashes[: (len(tokens) - 1) // SIZE]:
            cached = self.pool.get_cached_block(block_hash, [0])
            if cached is None:
                break
            hit += cached
        length = len(hit) * SIZE
        if scores:
            length = self.scored.served(request, scores, self.pool, hit, length)
        blocks = hit[: length // SIZE]
        for block in blocks:
            if block in self.pool.free:
                self.pool.free.remove(block)
        new = [self.pool.free.pop(0) for _ in range(-(-len(tokens) // SIZE) - len(blocks))]
        for block in new:
            block.block_hash = None
            if block in self.pool.served:
                self.pool.served.remove(block)
        self.scored.forget(new)
        forgotten = {block.block_id for block in new}
        self.computed = {part for part in self.computed if part[0] not in forgotten}
        blocks += new
        if scores:
            self.cache.place(0, scores, ([block.block_id for block in blocks],), length)
        for start in range(length, len(tokens), chunk):
            end = min(start + chunk, len(tokens))
            full = range(max(start // SIZE, length // SIZE), end // SIZE)
            for index in full:
                blocks[index].block_hash = hashes[index]
                self.pool.served.append(blocks[index])
            if full and scores:
                filled = [blocks[index] for index in full]
                self.scored.add(request, scores, self.pool, filled, full[0])
            self.compute(tokens, scores, start, end)
            if start == length:
                for cached in self.cache.take_new():
                    self.check(tokens, scores, cached.scores().values.numpy(), blocks)
            self.computed |= {
                (blocks[position // SIZE].block_id, score.key, position % SIZE)
                for score in scores
                for position in range(start, end)
                if selects(score, position)
            }
        self.cache.settle(self.step)
        self.cache.release([0])
        self.pool.free += reversed(blocks)
        return length

    def compute(
        self, tokens: list[int], scores: tuple[KeptScore, ...], start: int, end: int
    ) -> None:
        self.step += 1
        values = np.full((end - start, COLUMNS), -1.0, np.float32)
        for score in scores:
            for position in range(start, end):
                if selects(score, position):
                    values[position - start, score.slot] = true_score(tokens, position, score.key)
        run = {name: np.array([0]) for name in ("slot", "row")}
        runs = Fake(
            **run,
            length=np.array([end - start]),
            position=np.array([start]),
            scored=np.array([1]),
            has_rows_of=lambda last: False,
        )
        prepared = Fake(plan=Fake(runs=runs), positions=None)
        placed = self.log.add(torch.from_numpy(values))
        shipment = Fake(scores=lambda: placed)
        self.cache.record(prepared if scores else None, shipment, self.step)  # type: ignore[arg-type]

    def check(
        self, tokens: list[int], scores: tuple[KeptScore, ...], rows: Any, blocks: list[Any]
    ) -> None:
        for score in scores:
            for position in range(len(rows)):
                if not selects(score, position):
                    continue
                place = blocks[position // SIZE].block_id, score.key, position % SIZE
                if place in self.computed:
                    assert rows[position, score.slot] == true_score(tokens, position, score.key)
                else:
                    assert self.scored._skips
                    assert np.isnan(rows[position, score.slot])
                    self.unscored += 1


def selects(score: KeptScore, position: int) -> bool:
    return any(
        start <= position and (stop is None or position < stop) for start, stop in score.ranges
    )


def random_scores(draw: random.Random) -> tuple[KeptScore, ...]:
    slots = draw.sample(range(COLUMNS), draw.randrange(0, 4))
    ranges: Any = [((0, None),), ((3, 9),), ((0, 6), (8, None)), ((10, None),)]
    return tuple(
        KeptScore(key, slot, draw.choice([ranges[0], draw.choice(ranges)]))
        for key, slot in zip(draw.sample("abcd", len(slots)), slots, strict=True)
    )


@pytest.mark.parametrize("unscored", ["compute", "skip"])
@given(seed=st.integers(0, 10**9))
def test_scores_that_the_cache_serves_are_those_of_the_tokens(unscored: str, seed: int) -> None:
    draw = random.Random(seed)
    engine = Engine(draw.choice([None, None, 2]), unscored)
    trunks = [[draw.randrange(9) for _ in range(30)] for _ in range(3)]
    served = []
    for _ in range(25):
        tokens = draw.choice(trunks)[: draw.randrange(1, 31)]
        if draw.random() < 0.3:
            tokens = [*tokens, *(draw.randrange(9) for _ in range(9))]
        served.append(engine.run(tokens, random_scores(draw), draw.choice([3, 4, 7, 40])))
    assert not len(engine.cache)


def score(key: str, slot: int = 0, ranges: Any = ((0, None),)) -> KeptScore:
    return KeptScore(key, slot, ranges)


def test_a_request_that_comes_again_is_served_whole_blocks_with_its_scores() -> None:
    engine, tokens = Engine(), list(range(18))
    assert [engine.run(tokens, (score("a"),), 18) for _ in range(3)] == [0, 16, 16]
    assert engine.run(tokens, (score("a", 3),), 18) == 16  # in another column
    assert engine.run(tokens, (score("b"),), 18) == 0
    # A block of each is there: each request gets its own.
    assert engine.run(tokens, (score("a"),), 18) == 16
    assert engine.run(tokens, (score("b"),), 18) == 16
    assert engine.run(tokens, (), 18) == 16


def test_with_unscored_tokens_skipped_a_hit_is_as_long_as_without_a_probe() -> None:
    engine, tokens = Engine(unscored="skip"), list(range(18))
    engine.run(tokens, (), 18)
    assert engine.run(tokens, (score("a"),), 18) == 16
    assert engine.unscored == 16
    # What was computed with the score has it, also beside what was not.
    longer = [*tokens[:12], *range(50, 60)]
    engine.unscored = 0
    assert engine.run(longer, (score("a"), score("b", 1, ((9, None),))), 22) == 12
    assert engine.unscored == 12 + 3
    engine.unscored = 0
    assert engine.run(longer, (score("a"), score("b", 1, ((9, None),))), 22) == 20
    assert engine.unscored == 12 + 3


def test_a_token_that_is_computed_in_the_step_that_skips_its_score_gets_no_other_number() -> None:
    """A step writes a number of each of its tokens, also where the probe does not read."""
    engine, tokens = Engine(unscored="skip"), list(range(18))
    late = score("a", 0, ((10, None),)), score("b", 1)
    assert engine.run(tokens, late, 18) == 0
    assert engine.run(tokens, (score("a"),), 18, together=True) == 0
    assert engine.run(tokens, (score("a"),), 18) == 16
    assert engine.unscored == 0


@pytest.mark.parametrize("kept", [{"memory": 1}, {"nbytes": 8}])
def test_what_a_gate_remembers_and_sums_are_never_skipped(kept: dict[str, int]) -> None:
    engine, tokens = Engine(unscored="skip"), list(range(18))
    state = KeptScore("a", 0, ((0, 18),), **kept)
    engine.run(tokens, (), 18)
    assert engine.run(tokens, (state,), 18) == 0
    assert engine.run(tokens, (state,), 18) == 16
    assert engine.unscored == 0


def test_what_a_gate_remembers_is_served_once_its_step_is_scheduled() -> None:
    engine, tokens = Engine(), list(range(18))
    memory = KeptScore("a", 0, ((0, None),), memory=1)
    assert [engine.run(tokens, (memory,), 18, together=True) for _ in range(2)] == [0, 0]
    assert engine.run(tokens, (memory,), 18) == 16


def test_a_score_that_was_dropped_is_kept_anew_by_later_requests_alone() -> None:
    engine, tokens = Engine(most=1), list(range(18))
    engine.run(tokens, (score("a"),), 18)
    engine.run(tokens, (score("b"),), 18)
    assert engine.dropped == ["a"]
    assert engine.run(tokens, (score("a"),), 18) == 0
    assert engine.run(tokens, (score("a"),), 18) == 16


def test_no_score_of_another_request_of_the_step_is_dropped() -> None:
    engine, tokens = Engine(most=1), list(range(18))
    for key in "ab":
        engine.run(tokens, (score(key),), 18, together=True)
    assert engine.dropped == []
    engine.run(tokens, (score("c"),), 18)
    assert engine.dropped == ["a", "b"]


def test_no_score_of_a_request_itself_is_dropped() -> None:
    engine, tokens = Engine(most=1), list(range(18))
    both = score("a"), score("b", 1)
    assert [engine.run(tokens, both, 18) for _ in range(2)] == [0, 16]
    assert engine.dropped == []
    assert engine.run(tokens, (score("c"),), 18) == 0
    assert engine.dropped == ["a", "b"]
    assert len(engine.cache._column_of) == 1


@pytest.mark.parametrize(("tokens", "most"), [(1000, 256), (1 << 20, 64), (1 << 30, 1), (0, 256)])
def test_the_memory_for_scores_is_bounded(tokens: int, most: int) -> None:
    assert most_scores(tokens) == most
