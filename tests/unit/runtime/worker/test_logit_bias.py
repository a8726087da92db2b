"""Biases of the rows from which tokens are sampled, draft tokens among them."""

import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fake_steps import TAPS, make_buffers, view_of
from support.plans import add, plan_of
from support.stored import make_arena

from midstream.errors import TapError
from midstream.ops.site import bind
from midstream.plan import ResolvedPlan, Vector
from midstream.plan.resolve.wire import to_bytes
from midstream.plan.resolved import ResolvedBias
from midstream.runtime.protocol.plan_version import PlanChange
from midstream.runtime.worker.logit_bias import LogitBias
from midstream.runtime.worker.session import StepRules, WorkerSession
from midstream.runtime.worker.step.step_batch import StepBatch, UnknownPositions
from midstream.runtime.worker.step_recorder import RankMemory
from midstream.transport.ring_copy import host_transport

VOCABULARY = 9
LOGITS = ("logits", 2)
PROMPT = 5


def batch_of(scheduled: list[int], drafts: list[int] | None) -> StepBatch:
    names = [f"r{nth}" for nth in range(len(scheduled))]
    counts = np.array(scheduled, np.int32)
    return StepBatch(
        names, counts, counts * 0, sum(scheduled), lambda: torch.zeros(0),
        drafts=None if drafts is None else np.array(drafts),
    )  # fmt: skip


def everywhere(batch: StepBatch) -> SimpleNamespace:
    """A plan in which each row of a batch has a program."""
    return SimpleNamespace(active=slice(0, batch.num_tokens), positions=np.arange(batch.num_tokens))


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
    bias.prepare(batch, everywhere(batch), lambda name: lambda _: biases[name])
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
    batch = batch_of([1, 3], [0, 2])
    bias.prepare(batch, everywhere(batch), lambda _: lambda _: [ResolvedBias((1,), (1.0,))])
    with pytest.raises(TapError, match="returned 2 rows where 4 tokens are sampled"):
        model.compute_logits(None)


class Biased:
    """A session with the tap of logits, and one request, whose plan favours a token."""

    def __init__(self, token: int) -> None:
        self.taps = {**TAPS, LOGITS: len(TAPS)}
        self.buffers, arena = make_buffers(tuple(self.taps)), make_arena()
        transport = host_transport(self.buffers.ring, arena)
        self.session = WorkerSession(
            RankMemory(self.buffers, self.taps, transport, arena), StepRules(64)
        )
        self.session.requests.add("a", "u", to_bytes(favouring(token)))
        self.model = SimpleNamespace(compute_logits=lambda rows: torch.zeros(rows, VOCABULARY))
        self.session.bias.attach(self.model)

    def change(self, token: int, position: int) -> None:
        """Let the plan favour another token from a position on."""
        change = PlanChange("a", "u", 1, position, to_bytes(favouring(token)))
        self.session.requests.change([change])

    def step(self, computed: int, count: int, drafts: int, slack: int = 0) -> list[int]:
        """The favourite of each sampled row of a step.

        Args:
            computed: what the host takes for the position of the first row.
            count: number of rows.
            drafts: how many of them are drafts.
            slack: by how much the host is wrong, and knows that it may be.
        """
        view = view_of(["a"], [count], [computed])._replace(drafts=np.array([drafts]))
        if slack:
            true = torch.arange(computed - slack, computed - slack + count)
            unknown = UnknownPositions(lambda: np.array([slack]), lambda: true)
            view = view._replace(unknown=unknown)
        self.session.before_forward(view)
        for tap, index in self.taps.items():
            hidden = self.buffers.switches if tap == LOGITS else torch.zeros(count, 4)
            bind(self.buffers.table[index], self.buffers, hidden.shape[1])
            table, tally = self.buffers.table[index], self.buffers.tally
            torch.ops.midstream.site(hidden, None, table, tally)
        self.session.after_forward()
        return self.model.compute_logits(1 + drafts).argmax(1).tolist()


def favouring(token: int) -> ResolvedPlan:
    """A plan with a bias of one token, wherever a token is sampled."""
    switch_on = add(Vector.parse([1.0, 0.0, 0.0, 0.0]))
    plan = plan_of(edits=[(LOGITS, switch_on, ((PROMPT - 1, None),))], prompt_len=PROMPT)
    return replace(plan, biases=(ResolvedBias((token,), (5.0,)),))


@pytest.mark.parametrize("slack", [1, 2, 4])
def test_before_the_first_position_of_a_new_version_the_biases_are_those_of_the_old_one(slack):
    """Rejected drafts are computed again under the version that held when they were scheduled."""
    biased = Biased(token=3)
    assert biased.step(0, PROMPT, drafts=0) == [3]
    assert biased.step(PROMPT, 4, drafts=3) == [3] * 4
    biased.change(token=7, position=9)
    found = biased.step(9, 4, drafts=3, slack=slack)
    assert found == [3] * slack + [7] * (4 - slack)
    assert biased.step(13 - slack, 4, drafts=3) == [
        3 if position < 9 else 7 for position in range(13 - slack, 17 - slack)
    ]


def test_a_version_without_biases_adds_none_from_its_first_position_on():
    biased = Biased(token=3)
    biased.step(0, PROMPT, drafts=0)
    plain = replace(favouring(7), edits=(), biases=())
    biased.session.requests.change([PlanChange("a", "u", 1, 7, to_bytes(plain))])
    assert biased.step(PROMPT, 4, drafts=3) == [3, 3, 0, 0]
