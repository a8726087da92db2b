"""Two ranks change before the same step: replayed in transformers, and both did the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engines import greedy
from support.oracle import Oracle
from support.ranks import ranks
from support.updating import Stepped, check_replay, everything, held, steer

PROMPT = [5, 17, 33, 101, 8, 77, 54, 23, 9]


@pytest.mark.parametrize("site", ["resid_post", "z"])
def test_two_ranks_change_their_edits_before_the_same_step(tiny_llama: Path, site: str) -> None:
    oracle = Oracle(tiny_llama, "model.layers", "post_attention_layernorm")
    v, w = torch.randn(2, 64, generator=torch.Generator().manual_seed(1))
    settings = {"sites": ["resid_post", "z"], "check_ranks": True}
    with ranks(tiny_llama, tensor_parallel_size=2, midstream=settings) as llm:
        run = Stepped(llm)
        (first, hook), (second, later) = steer(v, 1, 2.0), steer(w, 0, 3.0)
        extra = [] if site == "resid_post" else [type(first)(w, 1, 0.0, site="z")]
        for name in ("a", "b"):
            run.add(name, PROMPT, greedy(30), edits=[first], capture=everything())
        run.step(5)
        position = llm.update("a", edits=[second, *extra]).positions[0]
        run.step(5)
        again = llm.update("a", scale=0).positions[0]
        outputs = run.finish()
    found = outputs["a"].outputs[0]
    length = len(PROMPT) + 29
    assert held(found.receipt) == [(0, position), (position, again), (again, length)]
    check_replay(oracle, PROMPT, found, {0: [hook], 1: [later]})
    assert outputs["b"].outputs[0].receipt.versions == ()
    check_replay(oracle, PROMPT, outputs["b"].outputs[0], {0: [hook]})
