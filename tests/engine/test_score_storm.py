"""Random requests with probes, on shared prefixes and in so few blocks that they are evicted and
requests preempted: each has the scores of an engine without a prefix cache, bit by bit.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from support import tiny
from support.adversary_run import assert_idle_and_clean, counter
from support.engines import HAS_GPU, SMALL_CACHE, engine, generated, greedy, tokens
from support.nightly import rounds
from support.same_sums import same_sums

from midstream import Probe, Steer
from midstream.plan import AttentionPool, Classes, Flag, Hidden, Stop, Switch

REQUESTS = rounds(suite=28, nightly=2000)
ROWS = np.random.default_rng(6).standard_normal((16, tiny.HIDDEN)).astype(np.float32) / 4
HEADS = {"query": ROWS[3:5], "value": ROWS[5:7]}
UNITS = Hidden(ROWS[8:13], np.zeros(5), "gelu")
FAMILIES: dict[str, dict[str, Any]] = {
    "linear": {"direction": ROWS[7], "bias": 0.5, "layer": 1},
    "logistic": {"direction": ROWS[7], "link": "sigmoid", "layer": 2},
    "classes": {"classes": Classes(ROWS[:3]), "link": "softmax", "pool": "mean:8", "layer": 1},
    "attention": {"attention_pool": AttentionPool(**HEADS), "layer": 1},
    "window": {"attention_pool": AttentionPool(**HEADS, window=10), "pool": "max", "layer": 1},
    "multimax": {"attention_pool": AttentionPool(value=ROWS[5:7], kind="max"), "layer": 2},
    "average": {"direction": ROWS[8], "pool": "ema:0.9", "layer": 0},
    "layers": {"direction": ROWS[9:11], "layers": [0, 2]},
    "network": {
        "hidden": UNITS,
        "attention_pool": AttentionPool(query=ROWS[13:14, :5], value=ROWS[14:15, :5]),
        "layer": 1,
    },
}
PLACES: list[dict[str, Any]] = [
    *[{}] * 4,
    {"positions": slice(20, 90)},
    {"positions": slice(45, None)},
    {"phase": "prompt"},
    {"phase": "generated"},
    {"positions": "last_prompt"},
]
EDITS = [
    *[None] * 6,
    [Steer(4 * ROWS[1], 2)],
    [Steer(4 * ROWS[2], 1, phase="generated")],
    [Steer(4 * ROWS[0], 0, positions=slice(32, 48))],
]


@pytest.fixture
def small(tiny_llama: Path) -> Iterator[Any]:
    """An engine with room for two of the longest requests."""
    with engine(tiny_llama, **SMALL_CACHE) as found:
        yield found


class Requests:
    """Draws requests, whose prompts begin with paths of a small tree."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        root = self._tokens(50)
        branches = [[*root, *self._tokens(self._draw.randrange(20, 60))] for _ in range(2)]
        self._paths = [
            [*branch, *self._tokens(self._draw.randrange(20, 70))]
            for branch in branches
            for _ in range(2)
        ]
        self._usual = [self._probes() for _ in range(4)]

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(3, tiny.VOCAB) for _ in range(count)]

    def _prompt(self) -> list[int]:
        draw = self._draw
        path = draw.choice(self._paths)
        start = path if draw.random() < 0.5 else path[: draw.randrange(50, len(path))]
        rest = self._tokens(draw.randrange(1, 30)) if draw.random() < 0.4 else []
        return [*start, *rest]

    def _probes(self) -> list[Probe]:
        draw, made = self._draw, []
        for name in draw.sample(list(FAMILIES), draw.randrange(1, 4)):
            place = draw.choice(PLACES)
            made.append(Probe(**FAMILIES[name], **place, name=name, act=self._act(name, place)))
        return made

    def _act(self, name: str, place: dict[str, Any]) -> Any:
        draw = self._draw
        if name == "classes" or draw.random() < 0.5:
            return None
        if place.get("phase") != "generated":
            # Where another act of a prompt holds from depends on how the prompt is divided.
            return Flag(above=draw.uniform(-1, 2))
        if draw.random() < 0.5:
            return Stop(above=draw.uniform(0, 2))
        return Switch(above=draw.uniform(0, 2), edits=[Steer(4 * ROWS[15], 1)])

    def batch(self) -> tuple[list[list[int]], Any, dict[str, Any]]:
        """Prompts, their parameters, and what is asked of each."""
        draw = self._draw
        prompts = [self._prompt() for _ in range(draw.randrange(1, 8))]
        asked = {
            "probes": [
                self._probes() if draw.random() < 0.2 else draw.choice([*self._usual, None])
                for _ in prompts
            ],
            "edits": [draw.choice(EDITS) for _ in prompts],
        }
        return prompts, greedy(draw.choice([2, 12, 24, 40]), detokenize=False), asked


@contextmanager
def counting_evictions(llm: Any) -> Iterator[list[Any]]:
    """Yield a list of the blocks that leave an engine's cache for other tokens."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    evict, evicted = pool._maybe_evict_cached_block, []

    def noted(block: Any) -> bool:
        done: bool = evict(block)
        if done:
            evicted.append(block.block_id)
        return done

    with mock.patch.object(pool, "_maybe_evict_cached_block", noted):
        yield evicted


@pytest.mark.skipif(HAS_GPU, reason="the sums of its kernels depend on the rows of a step")
def test_scores_under_eviction_and_preemption_are_those_without_a_cache_bit_by_bit(
    small: Any, uncached: Any
) -> None:
    requests = Requests(12)
    total = hits = served = acts = 0
    with same_sums(), counting_evictions(small) as evicted:
        while total < REQUESTS:
            prompts, params, asked = requests.batch()
            outputs, expected = (
                llm.generate(list(map(tokens, prompts)), params, use_tqdm=False, **asked)
                for llm in (small, uncached)
            )
            for number, (mine, theirs) in enumerate(zip(outputs, expected, strict=True), total):
                assert generated(mine) == generated(theirs), number
            for mine, theirs, probes in zip(outputs, expected, asked["probes"], strict=True):
                total += 1
                if probes is None:
                    continue
                assert mine.receipt.status == "ok"
                assert mine.receipt.actions == theirs.receipt.actions, total
                acts += len(mine.receipt.actions)
                hits += mine.num_cached_tokens
                served += mine.num_cached_tokens > 0
                for name in [probe.name for probe in probes]:
                    wanted = theirs.probes[name]
                    assert wanted.isfinite().all()
                    assert torch.equal(mine.probes[name], wanted), (total, name)
                    positions = [each.probes.positions_of(name) for each in (mine, theirs)]
                    assert torch.equal(*positions), (total, name)
    # The scores of every third request, at least, came out of the cache in part.
    assert served > total // 3, (served, total)
    assert hits > 32 * served
    assert len(evicted) > total
    assert counter(small, "vllm:num_preemptions") > total // 40
    assert acts > total // 10
    assert_idle_and_clean(small)
