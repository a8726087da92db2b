"""Sites inside attention and the MLP over several ranks give what one rank gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import inner_served, tiny
from support.engines import GPU_MEMORY, engine, generated, greedy, tokens
from support.oracle_edits import At
from support.ranks import PIPELINE, assert_same, ranks

from midstream import (
    Ablate,
    Attention,
    Bias,
    Capture,
    Clamp,
    Entropy,
    Gate,
    Logits,
    Mass,
    Probe,
    Reading,
    Replace,
    Route,
    Scale,
    SpecError,
    Steer,
    TopKeys,
)
from midstream.runtime.protocol.segments import RankShare
from midstream.sites import INNER, NAMES
from midstream.tools.capacity import read_model
from midstream.tools.capacity.job import ranks as ranks_transfer

# Two heads of queries and one of keys and values, which two ranks both have.
HEAD, HIDDEN, NEURONS = 32, 64, 96
EVERY = [site for site in NAMES if site not in ("router", "logits")]  # no layer too
INSIDE = [site for site in INNER if site != "router"]
SETTINGS = {
    "max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 48,
    "enable_prefix_caching": False, **GPU_MEMORY,
}  # fmt: skip
draw = torch.Generator().manual_seed(7)
PROMPTS = [torch.randint(3, tiny.VOCAB, (n,), generator=draw).tolist() for n in (5, 70, 23)]


def vector(size: int, scale: float = 2.0) -> list[float]:
    return (torch.randn(size, generator=draw) * scale).tolist()


EDITS: list[Any] = [
    Steer(vector(HIDDEN), 1, site="z"),
    Steer(vector(HEAD), 1, site="z", head=1),
    Steer(vector(HEAD), 1, site="q", head=[0, 1], norm="match", scale=0.5),
    Steer(vector(HEAD), 0, site="rot_q", head=0, norm="keep"),
    Scale(0.0, "all", site="z", head=1),
    Scale(0.25, 1, site="k"),
    Scale(-1.0, 1, site="v"),
    Scale(vector(HIDDEN), 1, site="z", shift=vector(HIDDEN)),
    Scale(vector(NEURONS, 1.0), 0, site="mlp_act"),
    Scale(0.0, 2, site="mlp_act", dims=[3, 50, 95]),
    Scale(1.5, 1, site="mlp_pre", dims=range(40, 60)),
    Replace(vector(HEAD), 1, site="rot_k", positions=slice(1, 4)),
    Replace(vector(HEAD), 2, site="z", head=0, positions=slice(2, None)),
    Replace(vector(NEURONS), 0, 0.5, site="mlp_pre_linear", dims=[0, 47, 48]),
    Ablate([vector(HEAD), vector(HEAD)], 1, site="z", head=1),
    Ablate(vector(HEAD), 1, site="v", head=0),
    Clamp(vector(HEAD), 1, site="z", head=[0, 1], low=3.0),
    Steer(vector(HIDDEN), site="embed"),
    Clamp(vector(HIDDEN), site="final_norm", low=3.0),
    Gate(Scale(-1.0, site="final_norm"), vector(HIDDEN)),
]
BIASES: list[Any] = [
    Bias({7: 40.0}),
    Bias({9: 50.0, 190: 40.0}, phase="generated"),
    Gate(Bias({11: 60.0}), Reading(vector(HIDDEN), site="final_norm")),
]


@pytest.fixture(scope="module")
def path(tiny_models: Path) -> Path:
    return tiny.make("llama", tiny_models)


@pytest.fixture(scope="module")
def alone(path: Path) -> Iterator[Any]:
    with engine(path, midstream={"sites": [*EVERY, "logits"]}, **SETTINGS) as llm:
        yield llm


# Stages have whole layers; that their rows and edits come together is in the mix of test_ranks too.
@pytest.fixture(
    scope="module", params=["tensor", pytest.param("pipeline", marks=pytest.mark.nightly)]
)
def several(request: Any, path: Path) -> Iterator[Any]:
    how = {"tensor_parallel_size": 2} if request.param == "tensor" else PIPELINE
    midstream = {"sites": [*EVERY, "logits"], "check_ranks": True}
    with ranks(path, midstream=midstream, **SETTINGS, **how) as llm:
        yield llm


def run(llm: Any, capture: Any, edits: list[Any] | None = None) -> list[Any]:
    """Every prompt plain, and one of them with each edit, in one batch."""
    given = [None, None, None, *([edit] for edit in edits or ())]
    prompts = [tokens(PROMPTS[nth % 3]) for nth in range(len(given))]
    captures = [capture] * len(given)
    found: list[Any] = llm.generate(
        prompts, greedy(4, detokenize=False), capture=captures, edits=given, use_tqdm=False
    )
    return found


@pytest.mark.parametrize("how", ["gathered", "sharded"])
def test_rows_of_every_site_are_those_of_one_rank(alone, several, how):
    capture = Capture("all", EVERY, return_=how)
    assert_same(run(several, capture), run(alone, capture))


def test_edits_of_every_rank_do_what_they_do_on_one(alone, several):
    capture = Capture("all", [*INSIDE, "resid_post", "final_norm"], positions=[0, 3, "last"])
    plain, edited = run(alone, capture), run(alone, capture, EDITS)
    assert_same(run(several, capture, EDITS), edited)
    for nth, one in enumerate(edited[3:], 3):
        last, before = (each.activations["final_norm"][-1] for each in (one, plain[nth % 3]))
        assert (last - before).norm() > 1e-3, EDITS[nth - 3]


def test_biases_are_added_to_the_logits_of_the_whole_vocabulary_once(alone, several):
    given = [[one] for one in BIASES]
    prompts = [tokens(PROMPTS[nth]) for nth in range(3)]
    params = greedy(4, detokenize=False, logprobs=5)
    wanted, found = (
        llm.generate(prompts, params, edits=given, use_tqdm=False) for llm in (alone, several)
    )
    for one, other in zip(found, wanted, strict=True):
        assert one.receipt.status == "ok"
        assert one.receipt.edited == other.receipt.edited
        assert generated(one) == generated(other)
        for mine, theirs in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert {key: each.logprob for key, each in mine.items()} == pytest.approx(
                {key: each.logprob for key, each in theirs.items()}, abs=1e-3
            )
    assert generated(found[0]) == [7] * 4
    assert generated(found[1])[1:] == [9] * 3


def test_logits_of_the_last_stage_are_those_of_one_rank(alone, several):
    asked = Logits(4, positions=slice(1, None))
    if several.info.workers[0].tensor_ranks > 1:
        with pytest.raises(SpecError, match="unsupported with tensor parallelism"):
            run(several, asked)
        return
    for one, other in zip(run(several, asked), run(alone, asked), strict=True):
        assert one.receipt.status == "ok"
        assert torch.equal(one.logits.positions, other.logits.positions)
        torch.testing.assert_close(one.logits.values, other.logits.values, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.logits.logsumexp, other.logits.logsumexp)


def test_the_model_has_the_widths_and_heads_of_all_ranks(several):
    shape = several.info.shape
    assert [shape.size(("z", 1)), shape.num_heads(("z", 1))] == [HIDDEN, 2]
    assert [shape.size(("k", 1)), shape.num_heads(("k", 1))] == [HEAD, 1]
    assert shape.size(("mlp_act", 2)) == NEURONS


def test_a_planned_job_counts_what_each_rank_transfers(several, path):
    size = read_model(str(path))
    for way in ("gathered", "sharded"):
        for worker in several.info.workers:
            taps, ranks_of_tap = worker.taps, worker.tensor_ranks
            planned = ranks_transfer(size, taps, ranks_of_tap, way)[worker.tensor_rank]
            share = RankShare(worker.tensor_rank, ranks_of_tap, worker.parts)
            mine = share.of_indices(tuple(range(len(taps))), way == "sharded")
            assert sorted(planned) == sorted(worker.widths[tap] for tap in mine)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"edits": Ablate(vector(HIDDEN), 1, site="z")}, "edits.*z is split over the ranks"),
        ({"edits": Steer(vector(HIDDEN), 1, site="q", norm="keep")}, "edits.*q is split over"),
        ({"probes": Probe(vector(HIDDEN), 1, site="z")}, "probes.*z is split over the ranks"),
        ({"capture": Capture(1, "mlp_act", codec="full8")}, "mlp_act is split over 2 ranks"),
    ],
)
def test_what_needs_the_parts_of_several_ranks_at_once_is_refused(several, asked, problem):
    prompts, params = [tokens(PROMPTS[0])], greedy(1, detokenize=False)
    if several.info.workers[0].tensor_ranks == 1:
        # The ranks of a pipeline have whole vectors.
        assert several.generate(prompts, params, **asked)[0].receipt.status == "ok"
        return
    with pytest.raises(SpecError, match=problem):
        several.generate(prompts, params, **asked)


def test_attention_of_every_head_is_that_of_one_rank(alone, several):
    """Each rank computes its heads; those that are asked for are chosen where all come together."""
    asked = [
        Attention("all", reduce="full"),
        Attention([0, 2], heads=[1], queries="generated", reduce=TopKeys(5), name="top"),
        Attention(1, heads=0, reduce=Mass(slice(1, 4)), name="mass"),
        Attention("all", queries=[0, 3, "last"], reduce=Entropy(), name="entropy"),
        Capture("all", ["resid_post", "rot_q"], return_="sharded"),
    ]
    for one, other in zip(run(several, asked), run(alone, asked), strict=True):
        assert one.receipt.status == other.receipt.status == "ok"
        assert list(one.activations) == list(other.activations)
        assert list(one.attention) == list(other.attention)
        for key, rows in other.attention.items():
            mine = one.attention[key]
            assert (mine.heads, mine.positions.tolist()) == (rows.heads, rows.positions.tolist())
            assert torch.allclose(mine.values, rows.values, atol=1e-4), key
            assert (mine.keys is None) == (rows.keys is None)
            if rows.keys is not None:
                certain = rows.values - rows.values.roll(-1, -1) > 1e-3
                assert torch.equal(mine.keys[certain], rows.keys[certain])


@pytest.mark.nightly
def test_ranks_choose_the_same_experts_where_these_call_the_router(tmp_path):
    path, oracle = inner_served.reference("qwen3_moe", tmp_path)
    given = inner_served.settings(oracle, tmp_path)
    with ranks(path, tensor_parallel_size=2, **given) as llm:
        served = inner_served.Served("qwen3_moe", oracle, llm)
        lists = [
            [],
            [At(Route(1, 3, {0: 2.0}, layer="all"))],
            [At(Replace([9.0, 0.0, -9.0, 0.0], 1, site="router", dims=[0, 2]))],
        ]
        edits = [[at.edit for at in ats] or None for ats in lists]
        outputs = served.ask([inner_served.PROMPTS[2]] * 3, 5, edits=edits)
        for ats, output in zip(lists, outputs, strict=True):
            assert output.receipt.status == "ok"
            served.assert_is(inner_served.PROMPTS[2], output, *ats)
