"""`Route` and captured logits where the experts' module calls the router itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import ask_all
from safetensors.torch import load_file
from support import tiny
from support.engines import HAS_GPU, engine, generated
from support.inner_served import END, PROMPTS, ROOM, TIE, TOLERANCE, Served, reference, settings
from support.oracle_edits import At, row_error
from support.pool import Pool

from midstream import Capture, Replace, Route, Steer, TokenIds
from midstream.errors import SpecError


@pytest.fixture(scope="module")
def served(tiny_models: Path, tmp_path_factory: Any, pool: Pool) -> Iterator[Served]:
    pool.close()  # experts need groups of processes that vLLM makes for such a model only
    path, oracle = reference("qwen3_moe", tiny_models)
    with engine(path, **settings(oracle, tmp_path_factory.mktemp("rows"))) as llm:
        yield Served("qwen3_moe", oracle, llm)


def test_experts_are_chosen_or_not_as_a_route_says(served):
    prompt = PROMPTS[2]
    some = {"positions": TokenIds(prompt[3:8])}
    given = [
        *(Route([one], layer="all") for one in range(4)),
        *(Route(None, [one, (one + 1) % 4], layer="all") for one in range(4)),
        *(Route(one, (one + 2) % 4, {(one + 1) % 4: 9}, layer=1, **some) for one in range(4)),
    ]
    every = [At(one) for one in given[:8]]
    every += [At(one, range(3, 8).__contains__) for one in given[8:]]
    outputs = served.ask([prompt] * len(given), 1, edits=[[one] for one in given])
    plain = served.oracle.run(prompt).values[END, 2]
    for at, output in zip(every, outputs, strict=True):
        seen = served.assert_is(prompt, output, at)
        assert row_error(seen.values[END, 2], plain) > 1e-3
        for layer in (1,) if at.edit.bias else (0, 1, 2):
            for position, row in enumerate(output.activations["router", layer]):
                chosen = set(row.topk(2).indices.tolist())
                if at.where(position):
                    assert chosen.issuperset(at.edit.activate)
                    assert chosen.isdisjoint(at.edit.deactivate)


def test_captured_logits_put_back_give_the_same_choice_of_experts(served):
    prompt = PROMPTS[2]
    route, count = Route(0, 3, layer="all"), len(prompt) + 4
    (given,) = served.ask([prompt], 5, edits=[route], capture=Capture("all", "router"))
    replayed = [
        Replace(rows, tap[1], site="router", positions=range(count))
        for tap, rows in given.activations.items()
    ]
    again, first, plain = served.ask([prompt] * 3, 5, edits=[replayed, [route], None])
    assert generated(again) == generated(first) == generated(given)
    for tap, value in first.activations.items():
        # A GPU sums in an order that depends on the batch: the first run was alone.
        assert row_error(again.activations[tap], value) <= (TOLERANCE if HAS_GPU else 0), tap
    assert not torch.equal(plain.activations[END, 2], first.activations[END, 2])


@pytest.mark.nightly
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_a_router_in_an_op_that_compilers_do_not_look_into_is_read_and_edited(
    eager: bool, tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    """On a GPU the experts are one opaque op; on a CPU vLLM calls its function, unless told to."""
    from vllm.model_executor.layers.fused_moe import MoERunner

    pool.close()
    chosen = []

    def choose(runner: Any) -> Any:
        chosen.append(runner)
        return torch.ops.vllm.moe_forward

    monkeypatch.setattr(MoERunner, "_select_forward", choose)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    path, oracle = reference("qwen3_moe", tiny_models)
    with engine(path, enforce_eager=eager, **settings(oracle, tmp_path)) as llm:
        served = Served("qwen3_moe", oracle, llm)
        lists = [
            [At(Route(1, 3, {0: 2.0}, layer="all"))],
            [],
            [At(Steer(served.vector(site, 1, False), 1, site=site)) for site in oracle.sites],
        ]
        prompts = [PROMPTS[2], PROMPTS[0], PROMPTS[1]]
        edits = [[at.edit for at in ats] or None for ats in lists]
        for prompt, ats, output in zip(
            prompts, lists, served.ask(prompts, 5, edits=edits), strict=True
        ):
            served.assert_is(prompt, output, *ats)
            assert output.receipt.status == "ok"
        assert len(chosen) == 3
        # Steps without work run vLLM's own model, whose experts call the same router.
        (plain,) = ask_all(llm, [PROMPTS[2]], 5)
        ids = generated(plain)
        logits = oracle.run([*PROMPTS[2], *ids][:-1]).logits[len(PROMPTS[2]) - 1 :]
        for row, token in zip(logits, ids, strict=True):
            assert float(row.max() - row[token]) <= TIE


@pytest.mark.nightly
@pytest.mark.skipif(HAS_GPU, reason="latent attention has no kernel for float32 on a GPU")
def test_logits_of_deepseek_are_its_routers_product_with_what_the_mlp_reads(tiny_models, pool):
    """By its own rows: vLLM's latent attention on a CPU is not transformers'."""
    pool.close()
    path = tiny.make("deepseek_v3", tiny_models, tiny.DEEPSEEK_V3)
    weights = load_file(path / "model.safetensors")
    taps = Capture([1, 2], ("mlp_in", "router"))
    bias = Route(bias={0: 3.0, 5: -2.0}, layer=[1, 2], positions=slice(4, None))
    # With AMX, vLLM takes kernels that have no float32.
    kernels = {"attention_backend": "CPU_MLA"}
    with engine(path, **ROOM, **kernels, midstream={"sites": ["mlp_in", "router"]}) as llm:
        outputs = ask_all(llm, [PROMPTS[2]] * 2, 5, capture=taps, edits=[[bias], None])
        for output, factor in zip(outputs, (1.0, 0.0), strict=True):
            assert output.receipt.status == "ok"
            for layer in (1, 2):
                read = output.activations["mlp_in", layer].float()
                logits = read @ weights[f"model.layers.{layer}.mlp.gate.weight"].float().T
                logits[4:, [0, 5]] += factor * torch.tensor([3.0, -2.0])
                assert row_error(output.activations["router", layer], logits) <= 1e-5
        with pytest.raises(SpecError, match="chosen in groups; `bias` alone is supported"):
            ask_all(llm, [PROMPTS[0]], 1, edits=[Route(1, layer=1)])
