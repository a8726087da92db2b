"""Sites inside attention and the MLP over several ranks give what one rank gives."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import inner_served, tiny
from support.conditions import first_met
from support.end_oracle import EndOracle
from support.engine_view import inspect
from support.engines import GPU_MEMORY, engine, generated, greedy, tokens
from support.oracle_edits import At
from support.ranks import PIPELINE, assert_same, ranks
from support.sae_oracle import RandomSae

from midstream import (
    SAE,
    Ablate,
    Affine,
    Attention,
    Bias,
    Capture,
    Clamp,
    Features,
    Gate,
    Lens,
    Logits,
    Probe,
    Replace,
    Route,
    Scale,
    Steer,
    Threshold,
)
from midstream.errors import SpecError
from midstream.lenses import JacobianLens
from midstream.plan import (
    AttentionPool,
    Classes,
    Entropy,
    Hidden,
    Mass,
    Reading,
    Stop,
    Switch,
    TopKeys,
)
from midstream.results.readouts import RESULTS
from midstream.results.readouts.base import KeyedRows
from midstream.sites import INNER, NAMES

# Two heads of queries and one of keys and values, which two ranks both have.
HEAD, HIDDEN, NEURONS = 32, 64, 96
EVERY = [site for site in NAMES if site not in ("router", "logits")]  # no layer too
INSIDE = [site for site in INNER if site != "router"]
SETTINGS = {
    "max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 48,
    "enable_prefix_caching": False, **GPU_MEMORY,
}  # fmt: skip
SEED = 7
draw = torch.Generator().manual_seed(SEED)
PROMPTS = [torch.randint(3, tiny.VOCAB, (n,), generator=draw).tolist() for n in (5, 70, 23)]


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """What a test draws does not depend on the tests before it."""
    draw.manual_seed(SEED)


def vector(size: int, scale: float = 2.0) -> list[float]:
    return (torch.randn(size, generator=draw) * scale).tolist()


def heads(count: int) -> AttentionPool:
    query = [vector(HIDDEN, 0.2) for _ in range(count)]
    return AttentionPool(query=query, value=[vector(HIDDEN) for _ in range(count)])


MAP = 4 * HIDDEN * HIDDEN  # bytes of a lens of one layer
SAES = 2 * (4 * 40 * (HIDDEN + 2) + 256)  # of two SAEs


def square(width: int) -> torch.Tensor:
    return torch.randn(width, width, generator=draw) / width**0.5


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
    Affine(matrix=square(HIDDEN), bias=vector(HIDDEN), layer=1),
    Affine(matrix=square(HEAD), layer=[0, 1], site="k", phase="generated"),
    Affine(matrix=square(HIDDEN), site="final_norm", scale=0.5),
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
    midstream = {"sites": [*EVERY, "logits"], "maps": 2, "readout_bytes": MAP + SAES}
    with engine(path, midstream=midstream, **SETTINGS) as llm:
        yield llm


# Stages have whole layers; that their rows and edits come together is in the mix of test_ranks too.
@pytest.fixture(
    scope="module", params=["tensor", pytest.param("pipeline", marks=pytest.mark.nightly)]
)
def several(request: Any, path: Path) -> Iterator[Any]:
    how = {"tensor_parallel_size": 2} if request.param == "tensor" else PIPELINE
    midstream = {
        "sites": [*EVERY, "logits"],
        "check_ranks": True,
        "maps": 2,
        "readout_bytes": MAP + SAES,
    }
    with ranks(path, midstream=midstream, **SETTINGS, **how) as llm:
        yield llm


def run(llm: Any, capture: Any, edits: list[Any] | None = None, **more: Any) -> list[Any]:
    """Every prompt plain, and one of them with each edit, in one batch."""
    given = [None, None, None, *([edit] for edit in edits or ())]
    prompts = [tokens(PROMPTS[nth % 3]) for nth in range(len(given))]
    captures = [capture] * len(given)
    found: list[Any] = llm.generate(
        prompts, greedy(4, detokenize=False), capture=captures, edits=given, use_tqdm=False, **more
    )
    return found


def assert_alike(found: list[Any], wanted: list[Any]) -> None:
    """Tokens, receipts, rows, scores and read-outs of two engines' outputs."""
    for nth, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert generated(one) == generated(other), nth
        assert hasattr(one, "receipt") == hasattr(other, "receipt"), nth
        if not hasattr(other, "receipt"):
            continue
        assert one.receipt.status == other.receipt.status == "ok"
        assert one.receipt.captured == other.receipt.captured
        if hasattr(other, "activations"):
            assert_same([one], [other])
        for name, scores in getattr(other, "probes", {}).items():
            torch.testing.assert_close(one.probes[name], scores, rtol=1e-3, atol=1e-4)
            assert torch.equal(one.probes.positions_of(name), other.probes.positions_of(name))
        for kind in RESULTS:
            mine, theirs = getattr(one, kind, None), getattr(other, kind, None)
            assert (mine is None) == (theirs is None), (nth, kind)
            if isinstance(theirs, KeyedRows):
                assert list(mine) == list(theirs)
                for key, rows in theirs.items():
                    assert_rows_alike(mine[key], rows)
            elif theirs is not None:
                assert_rows_alike(mine, theirs)


def assert_rows_alike(mine: Any, theirs: Any) -> None:
    """What is listed by its value is compared where values tell one from the next."""
    certain = (theirs.values - theirs.values.roll(-1, -1)).abs() > 1e-3
    for name in (field.name for field in dataclasses.fields(theirs)):
        here, there = getattr(mine, name), getattr(theirs, name)
        if not isinstance(there, torch.Tensor):
            assert here == there, name
        elif there.is_floating_point():
            torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
        elif name == "positions":
            assert torch.equal(here, there)
        elif name in ("ids", "keys"):
            assert torch.equal(here[certain], there[certain]), name


@pytest.mark.parametrize("how", ["gathered", "sharded"])
def test_rows_of_every_site_are_those_of_one_rank(alone, several, how):
    capture = Capture("all", EVERY, return_=how)
    assert_same(run(several, capture), run(alone, capture))


def test_edits_of_every_rank_do_what_they_do_on_one(alone, several):
    capture = Capture("all", [*INSIDE, "resid_post", "final_norm"], positions=[0, 3, "last_row"])
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


# Every form of logits, alone and beside rows that ranks share, and requests without any.
LOGITS: list[Any] = [
    Logits(4, positions=slice(1, None)),
    Logits(tokens=[150, 3, 190, 8]),
    None,
    [Logits(tokens="all", positions=["last_prompt", "generated"]),
     Capture("all", ["resid_post", "z"], return_="sharded")],
    [Logits(7), Attention(1, reduce=Entropy())],
    [Lens(2, top=2, positions=slice(2, 30)), Logits(3)],
    Capture([1], "resid_mid"),
    [Logits(2, positions=[0, 4]), Capture(sites="final_norm")],
    Logits(4, positions="last_prompt"),
    Logits(4, positions="generated"),
]  # fmt: skip


def ask_logits(llm: Any) -> list[Any]:
    prompts = [tokens(PROMPTS[nth % 3]) for nth in range(len(LOGITS))]
    edits = [
        [EDITS[-3]] if nth == 3 else [BIASES[0]] if nth == 4 else None
        for nth in range(len(prompts))
    ]
    found: list[Any] = llm.generate(
        prompts, greedy(4, detokenize=False), capture=LOGITS, edits=edits, use_tqdm=False
    )
    return found


def test_logits_in_a_mixed_batch_are_those_of_one_rank(alone, several):
    """In steps of chunks, of several requests, and of requests that ended at different times."""
    assert_alike(ask_logits(several), ask_logits(alone))


def test_logits_are_those_of_transformers_when_requests_are_preempted_and_aborted(path, several):
    """Whatever ends in between, the ranks call the head in the same steps."""
    oracle, engine_ = EndOracle(path, "llama"), several.llm_engine
    asked = [one for one in LOGITS if one is None or isinstance(one, Logits)] * 2
    for nth, one in enumerate(asked):
        params = greedy(9 - nth % 4, detokenize=False)
        if one is not None:
            params.extra_args = {"midstream": {"capture": one.to_dict()}}
        engine_.add_request(f"own-{nth}", tokens(PROMPTS[nth % 3]), params)
    outputs, steps = {}, 0
    while engine_.has_unfinished_requests():
        steps += 1
        if steps == 4:
            assert several.reset_prefix_cache(reset_running_requests=True)
        if steps in (2, 6):
            engine_.abort_request([f"own-{steps}", f"own-{steps + 1}"])
        outputs.update({one.request_id: one for one in engine_.step() if one.finished})
    gone = {"own-2", "own-3", "own-6", "own-7"}
    assert set(outputs) == {f"own-{nth}" for nth in range(len(asked))} - gone
    for name, output in outputs.items():
        one = asked[int(name.removeprefix("own-"))]
        if one is not None:
            assert output.receipt.status == "ok"
            logits = oracle.run([*output.prompt_token_ids, *generated(output)][:-1]).logits
            expected = logits[output.logits.positions]
            chosen = expected.gather(1, output.logits.ids)
            torch.testing.assert_close(output.logits.values, chosen, atol=5e-4, rtol=1e-4)
            total = expected.logsumexp(-1)
            torch.testing.assert_close(output.logits.logsumexp, total, atol=5e-4, rtol=1e-4)
    inspect(several).check_integrity()


def test_features_of_every_stage_are_those_of_one_rank(alone, several, tmp_path):
    asked = []
    for kind, layer in (("jumprelu", 0), ("topk", several.info.shape.num_layers - 1)):
        sae = RandomSae(kind, HIDDEN, 40, f"blocks.{layer}.hook_resid_post")
        loaded = SAE.load(sae.write(tmp_path / kind))
        for llm in (alone, several):
            llm.saes.register(kind, loaded)
        asked.append(Features(kind, 4, slice(1, None), features=[9, 3]))
    assert_alike(run(several, asked), run(alone, asked))
    for llm in (alone, several):
        for name in ("jumprelu", "topk"):
            llm.saes.remove(name)


def test_lenses_of_the_last_stage_are_those_of_one_rank(alone, several):
    last = [layer for name, layer in several.info.workers[-1].taps if name == "resid_post"]
    where = {"positions": slice(1, None)}
    asked = [Lens(last, top=4, tokens=[9], **where), Lens(last[-1], kind="mapped", **where)]
    mapped = JacobianLens({last[-1]: square(HIDDEN)})
    for llm in (alone, several):
        llm.lenses.register("mapped", mapped)
    found = run(several, asked)
    assert_alike(found, run(alone, asked))
    for one in found:
        mapped, plain = (one.lens[name].values for name in ("mapped", "logit"))
        assert not torch.allclose(mapped[:, 0, :4], plain[:, -1])
    # A token of each rank's part of the head.
    for token in (3, 190):
        one, other = (llm.lenses.direction(token, last[-1], "mapped") for llm in (several, alone))
        assert float((one - other).abs().max()) <= 1e-6
    for llm in (alone, several):
        llm.lenses.remove("mapped")
    if several.info.workers[-1].stage:
        with pytest.raises(SpecError, match="layer 0 is on another pipeline stage"):
            run(several, Lens())


def test_what_needs_the_parts_of_several_ranks_at_once_is_refused(several):
    prompts, params = [tokens(PROMPTS[0])], greedy(1, detokenize=False)
    asked = {"edits": Ablate(vector(HIDDEN), 1, site="z"), "use_tqdm": False}
    if several.info.workers[0].tensor_ranks == 1:
        # The ranks of a pipeline have whole vectors.
        assert several.generate(prompts, params, **asked)[0].receipt.status == "ok"
        return
    with pytest.raises(SpecError, match="edits.*z is split over the ranks"):
        several.generate(prompts, params, **asked)


def test_scores_of_split_vectors_are_the_sums_of_the_parts_of_the_ranks(alone, several):
    """Of all tokens and of some, with a bias, beside the score of a vector that no rank splits."""
    probes = [
        Probe(vector(HIDDEN), 1, 7.5, site="z", name="z"),
        Probe(vector(HEAD), 1, site="z", head=1, name="head"),
        Probe(vector(HEAD), 0, site="rot_k", head=0, name="keys"),
        Probe(vector(NEURONS), 2, -3.0, site="mlp_act", name="neurons", phase="generated"),
        Probe(vector(HIDDEN), 1, 1.5, name="stream"),
        Probe(
            classes=Classes([vector(HIDDEN) for _ in range(3)], [7.5, -3.0, 0.0]),
            layer=1,
            site="z",
            name="classes",
        ),
        Probe(attention_pool=heads(2), layer=1, site="z", name="attention"),
        Probe(
            hidden=Hidden([vector(HIDDEN) for _ in range(3)], [2.0, -1.0, 0.5]),
            classes=Classes([vector(3), vector(3)]),
            layer=1,
            site="z",
            name="units",
        ),
    ]
    capture = Capture(1, "resid_post", positions="last_prompt")
    found = run(several, capture, EDITS[:2], probes=[probes] * 5)
    for one, other in zip(found, run(alone, capture, EDITS[:2], probes=[probes] * 5), strict=True):
        assert one.receipt.status == other.receipt.status == "ok"
        for probe in probes:
            mine, theirs = one.probes[probe.name], other.probes[probe.name]
            assert float(theirs.abs().max()) > 1
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def test_probes_of_split_vectors_act_by_their_whole_scores(alone, several):
    """They stop and switch, and controllers read them, where one rank does, beside probes of whole
    vectors. The first rank's part alone would meet the conditions elsewhere.
    """
    where = {"layer": tiny.LAYERS - 1, "name": "p", "phase": "generated"}
    probes = [
        Probe(vector(HIDDEN), bias=7.5, site="z", **where),
        Probe(vector(HEAD), site="z", head=1, **where),
        Probe(vector(NEURONS), bias=-3.0, site="mlp_act", **where),
        Probe(attention=Mass(slice(1, 4)), **where),
        Probe(vector(HIDDEN), bias=1.5, **where),
        Probe(attention_pool=heads(2), site="z", **where),
    ]
    edits, prompt = [Steer(vector(HIDDEN), 0, scale=0.5)], PROMPTS[2]
    params = greedy(16, detokenize=False)

    def ask(llm: Any, given: list[Any], controllers: list[Any]) -> list[Any]:
        found: list[Any] = llm.generate(
            [tokens(prompt)] * len(given), params, probes=[[one] for one in given],
            edits=[edits] * len(given), controller=controllers, use_tqdm=False,
        )  # fmt: skip
        inspect(llm).check_integrity()
        return found

    given, controllers, wanted = [], [], []
    for probe, free in zip(probes, ask(alone, probes, [None] * len(probes)), strict=True):
        scores = free.probes["p"].tolist()
        place = max(range(4, 13), key=lambda at: scores[at] - max(scores[:at]))
        threshold = (scores[place] + max(scores[:place])) / 2
        met = first_met(scores, above=threshold)
        given += [
            probe.replace(act=Stop(above=threshold)),
            probe.replace(act=Switch([Steer(vector(HIDDEN), 1)], above=threshold)),
            probe,
        ]
        controllers += [None, None, Threshold("p", above=threshold, on=0.0, off=1.0)]
        wanted += [met, met, None]
    found, expected = ask(several, given, controllers), ask(alone, given, controllers)
    for one, other, met in zip(found, expected, wanted, strict=True):
        assert one.receipt.status == other.receipt.status == "ok"
        assert generated(one) == generated(other)
        mine, theirs = one.receipt, other.receipt
        assert [(each.kind, each.position) for each in mine.actions] == [
            (each.kind, each.position) for each in theirs.actions
        ]
        assert mine.versions == theirs.versions
        torch.testing.assert_close(one.probes["p"], other.probes["p"], rtol=1e-4, atol=1e-3)
        if met is not None:
            assert [each.position for each in mine.actions] == [len(prompt) + met]
    assert all(len(one.receipt.versions) > 1 for one in found[1::3])
    assert sum(len(one.receipt.versions) > 1 for one in found[2::3]) > 2


@pytest.mark.parametrize(
    "kind",
    ["moments", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("mean", "max"))],
)
def test_reduced_rows_of_every_site_are_those_of_one_rank(alone, several, kind):
    asked = Capture("all", EVERY, "prompt", reduce=kind)
    for one, other in zip(run(several, asked), run(alone, asked), strict=True):
        assert one.receipt.status == other.receipt.status == "ok"
        assert list(one.activations) == list(other.activations)
        for tap, rows in other.activations.items():
            torch.testing.assert_close(one.activations[tap], rows, rtol=1e-3, atol=1e-4)
    norms = Capture("all", ["resid_post", "final_norm"], reduce="norm")
    for one, other in zip(run(several, norms), run(alone, norms), strict=True):
        for tap, rows in other.activations.items():
            torch.testing.assert_close(one.activations[tap], rows, rtol=1e-3, atol=1e-4)


def test_attention_of_every_head_is_that_of_one_rank(alone, several):
    """Each rank computes its heads; those that are asked for are chosen where all come together."""
    asked = [
        Attention("all", reduce="full"),
        Attention([0, 2], heads=[1], queries="generated", reduce=TopKeys(5), name="top"),
        Attention(1, heads=0, reduce=Mass(slice(1, 4)), name="mass"),
        Attention("all", queries=[0, 3, "last_row"], reduce=Entropy(), name="entropy"),
        Capture("all", ["resid_post", "rot_q"], return_="sharded"),
    ]
    probes = [
        Probe(attention=Mass(slice(1, 4)), layer=1, name="both"),
        Probe(attention=Entropy(), layer=2, head=1, phase="generated", name="one"),
        Probe(vector(HIDDEN), 1, name="linear"),
    ]
    found, expected = (run(llm, asked, probes=[probes] * 3) for llm in (several, alone))
    assert_alike(found, expected)


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
