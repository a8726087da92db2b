"""Sites inside attention and the MLP, and edits of single heads, against hooks in transformers."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.edit_cases import all_problems
from support.engines import engine, generated
from support.inner_cases import END, InnerMaker, captured, cases, fresh, with_neighbours
from support.inner_oracle import INNER, InnerOracle
from support.inner_served import (
    BLOCK,
    PROMPTS,
    TIE,
    TOLERANCE,
    Served,
    assert_rows,
    reference,
    settings,
)
from support.nightly import NIGHTLY
from support.oracle_edits import EVERY_SITE, At, row_error
from support.pool import Pool

from midstream import Capture, Gate, Probe, Replace, Scale, Steer
from midstream.errors import SpecError
from midstream.sites import INNER as EVERY_INNER
from midstream.store import open_store

EXPERTS = "mixtral", "qwen3_moe"  # of the second, `test_routing` has what is run by default
MODELS = [*INNER, pytest.param(EXPERTS[1], marks=pytest.mark.nightly)]
MODELS.remove(EXPERTS[1])
# The llama has two heads of keys for four, and a width of all heads that is not the model's.
ONE = pytest.mark.parametrize("served", ["llama"], indirect=True)
# Every operation takes long: by day on two models, one without rotary embedding.
NIGHT = pytest.mark.nightly
DAILY = "llama", "gpt2"
EDITED = [*DAILY, *(pytest.param(name, marks=NIGHT) for name in INNER if name not in DAILY)]
LONG = 90  # two steps, and two whole blocks
OTHERS = "gpt2", "phi3", "gemma3", *EXPERTS
IN_PLACE = "llama, whose queries and keys an op of vLLM's rotates in place"
COMPILED = [IN_PLACE, *(pytest.param(name, marks=NIGHT) for name in ("llama", *OTHERS))]
# Why each model is without a site.
REASONS = {
    "rot_q": "no rotary embedding; use q",
    "rot_k": "no rotary embedding; use k",
    "router": "no experts",
    "mlp_pre": "experts run in one kernel",
    "mlp_pre_linear": "experts run in one kernel|no gate",
    "mlp_act": "experts run in one kernel",
}


@pytest.fixture(scope="module", params=MODELS)
def served(
    request: pytest.FixtureRequest, tiny_models: Path, tmp_path_factory: Any, pool: Pool
) -> Iterator[Served]:
    if request.param in EXPERTS:
        pool.close()  # experts need groups of processes that vLLM makes for such a model only
    path, oracle = reference(request.param, tiny_models)
    with engine(path, **settings(oracle, tmp_path_factory.mktemp("rows"))) as llm:
        yield Served(request.param, oracle, llm)


def check_reads(served: Served) -> None:
    """A prompt of several steps among short ones; then again, with a hit of the prefix cache."""
    long = fresh(1, LONG)
    prompts = [long, *PROMPTS]
    layers = range(served.oracle.num_layers)
    every = {(site, layer) for site in (*served.oracle.sites, END) for layer in layers}
    for prompt, output in zip(prompts, served.ask(prompts, 5), strict=True):
        assert output.num_cached_tokens == 0
        assert set(output.activations) == every
        assert output.activations.positions.tolist() == list(range(len(prompt) + 4))
        assert output.receipt.status == "ok"
        served.assert_is(prompt, output)
    (whole,) = served.ask([long], 5)
    served.assert_is(long, whole)
    ends = Capture("all", (*served.oracle.sites, END), ["last_prompt", "generated"])
    (output,) = served.ask([long], 5, capture=ends)
    assert output.num_cached_tokens == LONG // BLOCK * BLOCK
    assert output.activations.positions.tolist() == list(range(LONG - 1, LONG + 4))
    assert generated(output) == generated(whole)
    served.assert_is(long, output)


def test_rows_of_inner_sites_are_what_the_modules_of_transformers_read_and_return(served):
    check_reads(served)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_too(name, tiny_models, tmp_path, monkeypatch, pool):
    name, in_place = name.split(",")[0], name == IN_PLACE
    if name in EXPERTS:
        pool.close()
    # Inductor takes long; of its graph, what is in the middle of three layers is like the first.
    path, oracle = reference(name, tiny_models, "llama of two layers" if in_place else "")
    oracle.sites = (*EVERY_SITE[:-1], *oracle.sites)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    given = settings(oracle, tmp_path)
    if in_place:  # a tap that is too late is seen in Inductor's graph alone
        ops = {"custom_ops": ["none", "+rotary_embedding"]}
        given |= {"inductor": True, "compilation_config": ops}
        given["midstream"]["tapped_model"] = "always"  # one model is compiled, not two
    # Inductor compiles a program to see whether the compiler knows what the processor has. At its
    # end, pytest's monkeypatch would delete the setting.
    known = torch._inductor.config.patch({"cpp.vec_isa_ok": True} if in_place else {})
    with known, engine(path, enforce_eager=False, **given) as llm:
        assert int(llm.llm_engine.vllm_config.compilation_config.mode) > 0
        check_reads(served := Served(name, oracle, llm))
        check_edits(served, every=10 if NIGHTLY else 16)


@pytest.mark.model
@pytest.mark.nightly
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_rows_and_edits_of_smollm2(eager, smollm2, tmp_path, monkeypatch):
    prompt = [(13 * nth) % 4000 + 300 for nth in range(LONG)]
    oracle = InnerOracle(smollm2, INNER["llama"])
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    with engine(smollm2, enforce_eager=eager, **settings(oracle, tmp_path)) as llm:
        served = Served("smollm2", oracle, llm)
        three = Capture([2, 14, 29], (*oracle.sites, END))
        keys = Steer(served.vector("k", 9, True), 9, site="k", head=1, positions=slice(4, 70))
        values = Replace(served.vector("v", 20, True), 20, site="v", head=2, phase="generated")
        ats = [
            At(Scale(0, 5, site="z", head=[0, 7])),
            At(keys, range(4, 70).__contains__),
            At(values, lambda position: position >= LONG),
            At(Scale(0, 11, site="mlp_act", dims=range(0, 1536, 2))),
        ]
        outputs = served.ask([prompt] * 2, 3, capture=three, edits=[None, [at.edit for at in ats]])
        served.assert_is(prompt, outputs[0])
        served.assert_is(prompt, outputs[1], *ats)


def check_edits(served: Served, every: int, each_kind: bool = False) -> None:
    last = served.oracle.num_layers - 1
    given = cases(
        served.oracle, PROMPTS, lambda nth: min(last, (1, 0, 1, 2)[nth % 4]), every, each_kind
    )
    assert len({case.name for case in given}) == len(given) > 50
    assert {case.tap[0] for case in given} == set(served.oracle.sites)
    mixed = with_neighbours(given, PROMPTS)
    found = all_problems(
        served.llm, served.oracle, mixed, TOLERANCE, TIE, captured=partial(captured, served.oracle)
    )
    assert not found, "\n".join([f"of {len(mixed)} cases:", *found[:40]])


@pytest.mark.parametrize("served", EDITED, indirect=True)
def test_every_operation_at_inner_sites_and_heads_does_what_its_formula_says_in_a_mixed_batch(
    served: Served,
) -> None:
    check_edits(served, (1 if NIGHTLY else 9) if served.name == "llama" else 13, True)


@ONE
def test_rows_of_several_widths_are_read_back_from_a_store_and_from_files(served):
    prompt, sites = PROMPTS[0], ("k", "z", "mlp_act", END)
    captures = [Capture([0, 2], sites, sink=sink) for sink in ("memory", "store", "npz")]
    (output,) = served.ask([prompt], capture=[captures])
    seen = served.assert_is(prompt, output)
    place = output.capture_results["store"].manifest
    kept = open_store(place["store"]).find(place["request"], place["child"]).activations()
    assert set(kept) == set(output.activations)
    assert_rows(kept, seen)
    for tap in kept:
        assert torch.equal(kept[tap], output.activations[tap].flatten(1))
    files = output.activation_manifest["files"]
    assert {(one["site"], one["layer"]) for one in files} == set(kept)
    for one in files:
        tap = one["site"], one["layer"]
        with np.load(one["path"]) as found:
            assert np.array_equal(found["rows"], kept[tap].numpy()), tap


def test_inner_sites_that_a_model_lacks_are_refused_by_name_and_reason(served):
    lacking = set(EVERY_INNER) - set(served.oracle.sites)
    assert lacking
    for site in sorted(lacking):
        for asked in ({"capture": Capture(1, site)}, {"edits": [Scale(0, 1, site=site)]}):
            with pytest.raises(SpecError, match=f"{site}.*({REASONS[site]})"):
                served.ask(PROMPTS[:1], 1, **asked)


@ONE
def test_wrong_edits_and_probes_are_refused_by_name(served):
    for edit, told in (
        (Scale(0, 1, site="z", head=4), "head.*head 4 is out of range: there are 4 heads"),
        (Scale(0, 1, site="k", head=[0, 2]), "head.*head 2 is out of range: there are 2 heads"),
        (Scale(0, 1, site="mlp_act", head=0), "head.*not of heads"),
        (Steer([1.0] * 64, 1, site="z", head=1), "vector.*expected 32 numbers, the size of a head"),
        (Steer([1.0] * 64, 1, site="z"), "vector.*expected 128 numbers, the width of z.*got 64"),
        (Replace([1.0] * 64, 1, site="mlp_act"), "rows.*expected 96 numbers.*mlp_act.*got 64"),
        (Scale(0, 1, site="mlp_act", dims=96), "dims.*96 is out of range.*96 numbers"),
        (Scale(0, 1, site="q", head=1, dims=32), "dims.*32 is out of range.*32 numbers"),
        (Gate(Scale(0, 1, site="z", head=1), [1.0] * 32), r"probe\.direction.*128 numbers"),
    ):
        with pytest.raises(SpecError, match=rf"edits\[0\].*{told}"):
            served.ask(PROMPTS[:1], 1, edits=[edit])
    with pytest.raises(SpecError, match=r"probes\[0\].*expected 32 numbers, the size of a head"):
        served.ask(PROMPTS[:1], 1, probes=[Probe([1.0] * 64, 1, site="q", head=1)])


@pytest.mark.parametrize("served", ["mixtral"], indirect=True)
def test_experts_are_forced_in_and_out_by_their_logits_for_some_tokens_of_some_requests(served):
    count, prompt = 4, PROMPTS[2]

    def put(value: float, expert: int | list[int], **where: Any) -> Replace:
        return Replace([value] * count, "all", site="router", dims=expert, **where)

    few = {"positions": [2, 5, 7]}
    asked: list[list[At]] = [
        [At(put(-1e4, [0, 3]))],
        [At(put(1e4, 1, **few), {2, 5, 7}.__contains__),
         At(put(-1e4, 2, **few), {2, 5, 7}.__contains__)],
        [At(put(-1e4, 1, phase="generated"), lambda position: position >= len(prompt))],
        [],
    ]  # fmt: skip
    outputs = served.ask([prompt] * 4, edits=[[at.edit for at in ats] or None for ats in asked])
    chosen = []
    for ats, output in zip(asked, outputs, strict=True):
        served.assert_is(prompt, output, *ats)
        chosen.append(output.activations["router", 1].topk(2, dim=-1).indices)
    assert set(chosen[0].unique().tolist()) == {1, 2}
    assert (chosen[1][[2, 5, 7]] == 1).any(-1).all()
    assert not (chosen[1][[2, 5, 7]] == 2).any()
    assert torch.equal(chosen[2][: len(prompt)], chosen[3][: len(prompt)])
    assert not (chosen[2][len(prompt) :] == 1).any()
    (again,) = served.ask([prompt])
    served.assert_is(prompt, again)


@ONE
def test_one_edit_of_sites_of_several_widths_and_edits_of_many_sites_at_once(served):
    oracle, long = served.oracle, fresh(40, LONG)
    draw, plain = torch.Generator().manual_seed(9), oracle.run(long)
    every = [InnerMaker((site, 1), (), oracle.head_dim, plain, draw) for site in oracle.sites]
    widths = Scale(0.6, "all", site=["q", "k", "z", "mlp_act"])
    of_heads = Scale(-0.5, [0, 2], site=["q", "v"], head=[0, 1])
    far = {"site": "resid_post", "layer": 0, "direction": every[0].direction((END, 0))}
    rows = torch.stack([served.vector("k", 1, True, seed) for seed in range(12)])
    lists: list[list[At]] = [
        [At(widths)],
        [At(of_heads)],
        [At(Gate(Scale(0.3, [1, 2], site=["q", "mlp_pre"]), far))],
        [At(maker.steer()) for maker in every],
        [At(Replace(rows, 1, site="k", head=1, positions=slice(58, 70)),
            range(58, 70).__contains__)],
    ]  # fmt: skip
    edits = [[at.edit for at in ats] for ats in lists]
    outputs = served.ask([long, *[long] * len(lists)], 3, edits=[None, *edits])
    for ats, output in zip([[], *lists], outputs, strict=True):
        seen = served.assert_is(long, output, *ats)
        assert not ats or row_error(seen.values[END, 2][:LONG], plain.values[END, 2]) > 1e-3
        edited = output.receipt.edited
        assert not ats or edited.applied == edited.expected > 0
