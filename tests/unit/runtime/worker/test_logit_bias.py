"""Biases of the rows from which tokens are sampled, draft tokens among them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from midstream.errors import TapError
from midstream.runtime.worker.logit_bias import LogitBias
from midstream.runtime.worker.step.step_batch import StepBatch
from midstream.spec.resolve.resolved import ResolvedBias

VOCABULARY = 9


def batch_of(scheduled: list[int], drafts: list[int] | None) -> StepBatch:
    names = [f"r{nth}" for nth in range(len(scheduled))]
    counts = np.array(scheduled, np.int32)
    return StepBatch(
        names, counts, counts * 0, sum(scheduled), lambda: torch.zeros(0),
        drafts=None if drafts is None else np.array(drafts),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_each_row_of_logits_gets_the_switches_of_its_own_token(seed):
    """Against a loop over requests; some are chunks of prompts, and some have no drafts."""
    draw = random.Random(seed)
    drafts = None if seed % 4 == 0 else [draw.choice([0, 0, 1, 3]) for _ in range(5)]
    sampled = [1 + one for one in drafts or [0] * 5]
    scheduled = [one + draw.choice([0, 0, 6]) for one in sampled]
    batch = batch_of(scheduled, drafts)
    biases = {
        name: [
            ResolvedBias(tuple(draw.sample(range(VOCABULARY), 3)), (1.5, -2.0, 0.25 * nth))
            for nth in range(draw.choice([0, 1, 2]))
        ]
        for name in batch.request_ids
    }
    switches = torch.full((64, 4), 7.0)  # of an earlier step
    bias = LogitBias(switches)
    plain = torch.randn(sum(sampled), VOCABULARY)
    model = SimpleNamespace(compute_logits=lambda hidden: plain.clone())
    bias.attach(model)
    bias.prepare(batch, biases.__getitem__)
    wanted = plain.clone()
    if any(biases.values()):
        assert not switches[: batch.num_tokens].any()
        switches[: batch.num_tokens] = torch.randint(0, 2, (batch.num_tokens, 4)).float()
        row = first = 0
        for name, count, tokens in zip(batch.request_ids, sampled, scheduled, strict=True):
            for place in range(count):
                for nth, one in enumerate(biases[name]):
                    on = switches[first + tokens - count + place, nth]
                    for token, value in zip(one.tokens, one.values, strict=True):
                        wanted[row, token] += on * value
                row += 1
            first += tokens
    torch.testing.assert_close(model.compute_logits(None), wanted)
    assert torch.equal(model.compute_logits(None), plain), "of prompts' log probabilities"


def test_logits_of_other_rows_than_were_expected_are_an_error():
    bias = LogitBias(torch.zeros(8, 4))
    model = SimpleNamespace(compute_logits=lambda hidden: torch.zeros(2, VOCABULARY))
    bias.attach(model)
    bias.prepare(batch_of([1, 3], [0, 2]), lambda name: [ResolvedBias((1,), (1.0,))])
    with pytest.raises(TapError, match="returned 2 rows where 4 tokens are sampled"):
        model.compute_logits(None)
