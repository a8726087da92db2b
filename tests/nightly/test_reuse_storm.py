"""Random requests with kept rows in little room, against an engine without a prefix cache."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adversary_run import assert_idle_and_clean, counter
from support.cached_pair import fresh
from support.engines import ALL_SITES, SMALL_CACHE, engine, greedy

from midstream import Capture, Probe, Steer

BATCHES = 25


@pytest.fixture
def tight(tiny_llama: Path) -> Iterator[Any]:
    midstream = {"sites": ALL_SITES, "reuse_bytes": 400_000}
    with engine(tiny_llama, **SMALL_CACHE, midstream=midstream) as found:
        yield found


def test_a_storm_of_requests_gets_the_rows_that_it_would_compute(tight: Any, uncached: Any) -> None:
    draw = random.Random(11)
    vectors = [torch.randn(64, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    late = Steer(vectors[1], 0, phase="generated")
    edits = [None, None, [Steer(vectors[0], 1, 3.0)], [late]]
    starts = [fresh(96) for _ in range(2)]
    captures = [
        Capture("all", ["resid_pre", "resid_post"], reuse=True),
        Capture([0, 2], reuse=True),
        Capture(1, "resid_mid", slice(10, 80), reuse=True),
        Capture("all", positions="generated", reuse=True),
    ]
    total = hits = 0
    for _ in range(BATCHES):
        asked = []
        for _ in range(draw.randrange(1, 8)):
            start = starts[draw.randrange(2)]
            prompt = [*start[: 16 * draw.randrange(0, 7)], *fresh(draw.randrange(1, 40))]
            if draw.random() < 0.5:
                prompt = start[: draw.randrange(50, 96)]
            capture = [captures[draw.randrange(4)]]
            if len(prompt) <= 10 and capture == [captures[2]]:
                capture = [captures[0]]
            if draw.random() < 0.2:
                capture.append(Capture(1, "resid_mid", positions=-1))
            probes = None
            if draw.random() < 0.2:
                probes = [Probe(vectors[0], layer=1, positions=slice(len(prompt) - 1, None))]
            asked.append((prompt, capture, draw.choice(edits), probes))
        prompts = [{"prompt_token_ids": each[0]} for each in asked]
        arguments = {
            "capture": [each[1] for each in asked],
            "edits": [each[2] for each in asked],
            "probes": [each[3] for each in asked],
        }
        params = greedy(draw.randrange(2, 40), detokenize=False)
        found = tight.generate(prompts, params, use_tqdm=False, **arguments)
        without = [[_computed(one) for one in each[1]] for each in asked]
        wanted = uncached.generate(
            prompts, params, use_tqdm=False, **{**arguments, "capture": without}
        )
        for mine, theirs in zip(found, wanted, strict=True):
            assert list(mine.outputs[0].token_ids) == list(theirs.outputs[0].token_ids)
            assert mine.receipt.status == "ok"
            total += 1
            hits += any(one.reused for one in mine.receipt.captured)
            for tap in theirs.activations:
                assert torch.equal(
                    mine.activations.positions_of(*tap), theirs.activations.positions_of(*tap)
                )
                torch.testing.assert_close(
                    mine.activations[tap], theirs.activations[tap], rtol=2e-4, atol=2e-4
                )
        if draw.random() < 0.1:
            tight.reset_prefix_cache()
    assert hits > total // 10
    assert counter(tight, "vllm:num_preemptions") > 0
    assert_idle_and_clean(tight)


def _computed(capture: Capture) -> Capture:
    """The same capture, with every row computed."""
    return Capture.parse({**capture.to_dict(), "reuse": False})
