"""Sites without a layer, the embedding and the final norm, against hooks in transformers."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.end_oracle import MODULES, EndOracle
from support.engines import HAS_GPU, engine, generated, greedy, tokens
from support.inner_cases import fresh
from support.inner_served import BLOCK, PROMPTS, ROOM, TOLERANCE, Served, assert_rows
from support.oracle_edits import At, row_error

from midstream import Ablate, Affine, Capture, Clamp, Gate, Replace, Scale, Steer
from midstream.plan import Reading

ENDS = ["embed", "final_norm"]
SITES = ["embed", "resid_pre", "resid_post", "final_norm"]
ONE = pytest.mark.parametrize("served", ["gpt2"], indirect=True)
LONG = 90  # two steps, and two whole blocks


def reference(name: str, folder: Path) -> tuple[Path, EndOracle]:
    path = tiny.make(f"{name}-ends", folder, tiny.MODELS[name])
    return path, EndOracle(path, name)


@pytest.fixture(scope="module", params=list(MODULES))
def served(request: pytest.FixtureRequest, tiny_models: Path) -> Iterator[Served]:
    path, oracle = reference(request.param, tiny_models)
    with engine(path, **ROOM, midstream={"sites": SITES}) as llm:
        yield Served(request.param, oracle, llm)


def check_reads(served: Served) -> None:
    """A prompt of several steps among short ones; then again, with a hit of the prefix cache."""
    long = fresh(1, LONG)
    every = Capture("all", SITES)
    for prompt, output in zip([long, *PROMPTS], served.ask([long, *PROMPTS], 5, capture=every),
                              strict=True):  # fmt: skip
        assert output.receipt.status == "ok"
        found = output.activations
        assert (found.sites, found.layers) == (tuple(SITES), (0, 1, 2))
        assert found["embed"].shape == found["final_norm"].shape == (len(prompt) + 4, 64)
        seen = served.assert_is(prompt, output)
        assert seen.values["final_norm", 2].shape == found["final_norm"].shape
    (output,) = served.ask([long], 5, capture=Capture(sites=ENDS, positions="last_prompt"))
    assert output.num_cached_tokens == LONG // BLOCK * BLOCK
    assert output.activations.positions_of("final_norm").tolist() == [LONG - 1]
    assert output.activations.token_ids_of("embed").tolist() == [long[-1]]
    served.assert_is(long, output)


def test_rows_are_what_transformers_embeds_and_what_its_head_reads(served):
    check_reads(served)


def test_they_are_the_scaled_embedding_and_the_last_hidden_state(served):
    prompt = PROMPTS[2]
    (output,) = served.ask([prompt], 1, capture=Capture(sites=ENDS))
    model, found = served.oracle.model, output.activations
    with torch.no_grad():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        embedded = model.get_input_embeddings().weight[torch.tensor(prompt)]
    scale = 8.0 if served.name == "gemma2" else 1.0  # √64
    assert row_error(found["embed"], embedded * scale) <= TOLERANCE
    assert row_error(found["final_norm"], states[-1][0]) <= TOLERANCE
    positions = served.name in ("gpt2", "opt")
    assert (row_error(found["embed"], states[0][0]) > 1e-2) == positions
    assert set(found.to_transformer_lens()) == {"hook_embed", "ln_final.hook_out"}


def edits(served: Served) -> list[list[At]]:
    """Every kind of edit, at both sites, at once and each alone."""
    draw = torch.Generator().manual_seed(11)
    size = {site: float(rows.norm(dim=-1).median())
            for site, rows in _ends(served, PROMPTS[2]).items()}  # fmt: skip

    def v(site: str, scale: float = 1.0) -> torch.Tensor:
        one = torch.randn(64, generator=draw)
        return one * (scale * size[site] / one.norm())

    found: list[list[At]] = []
    for site in ENDS:
        w = v(site, 2.0)
        found += [
            [At(Steer(w, site=site))],
            [At(Steer(w, site=site, norm="keep", positions=slice(2, None)), lambda at: at >= 2)],
            [At(Ablate([v(site), v(site)], site=site))],
            [At(Clamp(v(site), site=site, low=size[site]))],
            [At(Scale(-0.5, site=site, dims=range(10, 40)))],
            [At(Replace([v(site) for _ in range(3)], site=site, positions=[1, 2, 4]),
                [1, 2, 4].__contains__)],
            [At(Affine(read=[v(site)], write=[v(site)], site=site, scale=0.1))],
            [At(Gate(Steer(w, site=site), Reading(w, site="embed")))],
        ]  # fmt: skip
    late = Gate(Steer(v("final_norm", 2.0), site="final_norm", positions=slice(1, None)),
                Reading(w, layer=1))  # fmt: skip
    found.append([At(late, lambda at: at >= 1)])
    found.append([found[0][0], found[8][0], At(Steer(v("embed"), 1))])
    return found


def _ends(served: Served, prompt: list[int]) -> dict[str, torch.Tensor]:
    values = served.oracle.run(prompt).values
    return {"embed": values["embed", 0], "final_norm": values["final_norm", 2]}


def check_edits(served: Served, every: int = 1) -> None:
    asked = edits(served)[::every]
    prompts = [PROMPTS[nth % 3] for nth in range(len(asked))]
    mixed = [each for pair in zip(prompts, prompts, strict=True) for each in pair]
    given = [each for one in asked for each in ([at.edit for at in one], None)]
    outputs = served.ask(mixed, 4, capture=Capture("all", SITES), edits=given)
    for nth, (prompt, output) in enumerate(zip(mixed, outputs, strict=True)):
        ats = [] if nth % 2 else asked[nth // 2]
        assert output.receipt.status == "ok"
        seen = served.assert_is(prompt, output, *ats)
        assert all(seen.effect(tap) > 1e-3 for at in ats for tap in served.oracle.taps(at.edit))


def test_edits_do_what_their_formulas_say_in_a_mixed_batch(served):
    check_edits(served, 1 if served.name == "gpt2" else 3)


@ONE
@pytest.mark.parametrize("site", ENDS)
def test_the_prefix_cache_never_mixes_edited_and_plain_tokens(served, site):
    prompt = fresh(5 + ENDS.index(site), LONG)
    v = torch.randn(64, generator=torch.Generator().manual_seed(4)) * 3
    at = At(Steer(v, site=site, positions=slice(40, 64)), range(40, 64).__contains__)
    rest = Capture("all", SITES, "generated")
    for hit, ats in ((0, [at]), (BLOCK, []), (64, [at]), (64, [])):
        (output,) = served.ask([prompt], 4, capture=rest, edits=[one.edit for one in ats] or None)
        assert output.num_cached_tokens == hit
        assert output.receipt.status == "ok"
        served.assert_is(prompt, output, *ats)


@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.nightly) for one in MODULES])
def test_compiled_too(name, tiny_models, tmp_path, monkeypatch):
    path, oracle = reference(name, tiny_models)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    with engine(path, enforce_eager=False, **ROOM, midstream={"sites": SITES}) as llm:
        served = Served(name, oracle, llm)
        check_reads(served)
        check_edits(served, 3)


@pytest.mark.skipif(
    HAS_GPU and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0",
    reason="vLLM's V2 runner takes no embeddings",
)
def test_embeddings_given_with_the_prompt_have_no_positions_yet(tiny_models):
    """A model that adds positions gets these where midstream cannot see the embeddings before."""
    params = greedy(3, detokenize=False)
    for name, tapped in (("gpt2", False), ("llama", True)):
        path, oracle = reference(name, tiny_models)
        with engine(path, **ROOM, enable_prompt_embeds=True, midstream={"sites": SITES}) as llm:
            state = llm.sites()["embed", 0]
            assert state.tapped == tapped
            assert (
                tapped or "adds positions to the embeddings, which it may be given" in state.reason
            )
            assert llm.sites()["final_norm", 2].tapped
            if not tapped:
                continue
            given = oracle.model.get_input_embeddings().weight[torch.tensor(PROMPTS[0])].detach()
            outputs: list[Any] = [
                llm.generate([prompt], params, capture=Capture(sites=ENDS), use_tqdm=False)[0]
                for prompt in ({"prompt_embeds": given}, tokens(PROMPTS[0]))
            ]
            for output in outputs:
                seen = oracle.run([*PROMPTS[0], *generated(output)][:-1])
                assert_rows(output.activations, seen)
