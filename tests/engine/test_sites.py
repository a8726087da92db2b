"""All six sites of every layer against transformers with plain hooks: read, and edited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny
from helpers.engines import engine, generated, greedy, tokens
from helpers.oracle import Branches, HookEdit, Oracle, relative_error
from torch import Tensor

from midstream import Capture, SpecError, Steer
from midstream.sites import NAMES

TOLERANCE = 1e-4
MAX_TOKENS = 4
PROMPT = [5, 17, 33, 101, 8, 77, 54, 23, 9, 150, 44]
SANDWICH = Branches(attn_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm")
BRANCHES = {
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "gpt2": Branches(attn_out="attn"),
    "opt": Branches(mlp_in="fc1", mlp_out="fc2"),
}
# What transformers makes of a request: its steering, its tokens, the vectors at every tap.
Case = tuple[dict[str, Any] | None, list[int], dict[tuple[str, int], Tensor]]


def cases(oracle: Oracle, prompt: list[int]) -> list[Case]:
    """The plain request, and one edit at each site: on every token, or on the generated ones."""
    _, plain = oracle.run(prompt)
    draw = torch.Generator().manual_seed(11)
    found: list[Case] = []
    for nth, site in enumerate((None, *oracle.sites)):
        steer, hooks = None, []
        if site is not None:
            layer = nth % len(oracle.layers)
            vector = torch.randn(oracle.model.config.hidden_size, generator=draw)
            vector *= plain[site, layer].norm(dim=-1).median() / vector.norm()
            # Two in three act on the prompt too.
            first = len(prompt) if nth % 3 == 0 else 0
            phase = {"phase": "generated"} if first else {}
            steer = {"vector": vector, "layer": layer, "site": site, "scale": 1.5, **phase}
            hooks = [HookEdit(site, layer, vector, 1.5, lambda p, first=first: p >= first)]
        made = oracle.generate(prompt, MAX_TOKENS, hooks)
        _, seen = oracle.run([*prompt, *made][:-1], hooks)
        found.append((steer, made, seen))
    return found


def check(llm: Any, prompt: list[int], wanted: list[Case], sites: tuple[str, ...]) -> None:
    """All of them as one batch, and each of them equal to what transformers does."""
    outputs = llm.generate(
        [tokens(prompt)] * len(wanted),
        greedy(MAX_TOKENS, detokenize=False),
        capture=Capture(layers="all", sites=sites),
        steer=[None if steer is None else [Steer(**steer)] for steer, _, _ in wanted],
        use_tqdm=False,
    )
    for (steer, made, expected), output in zip(wanted, outputs, strict=True):
        what = {name: value for name, value in (steer or {}).items() if name != "vector"}
        assert generated(output) == made, what
        assert set(output.activations) == set(expected)
        for tap, vectors in expected.items():
            error = relative_error(output.activations[tap], vectors)
            assert error < TOLERANCE, f"{tap} with {what}: {error}"
        assert output.receipt.status == "ok"
        if steer is not None:
            assert output.receipt.edited.applied == output.receipt.edited.expected > 0
    plain, *steered = (vectors for _, _, vectors in wanted)
    last = "resid_post", max(layer for _, layer in plain)
    for (steer, *_), vectors in zip(wanted[1:], steered, strict=True):
        rows = min(len(vectors[last]), len(PROMPT))
        assert steer is not None
        if "phase" not in steer:
            moved = relative_error(vectors[last][:rows], plain[last][:rows])
            assert moved > 0.01, f"an edit at {steer['site']} changes nothing: it tests nothing"


@pytest.mark.parametrize("name", list(tiny.MODELS))
def test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers(
    name: str, tiny_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tiny.MODELS[name]
    model = tiny.make(name, tiny_models)
    # vLLM changes transformers' own classes for some models: the reference comes first.
    oracle = Oracle(model, spec.layers, spec.mid, branches=BRANCHES.get(name, Branches()))
    wanted = cases(oracle, PROMPT)
    lacking = set(NAMES) - set(oracle.sites)
    assert lacking == ({"resid_mid"} if spec.mid is None else set())
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    for eager in (True, False):
        with engine(model, enforce_eager=eager, midstream={"sites": list(oracle.sites)}) as llm:
            check(llm, PROMPT, wanted, oracle.sites)
            for site in lacking:
                with pytest.raises(SpecError, match=rf"{site}.*in parallel"):
                    llm.generate(tokens(PROMPT), greedy(2), capture=Capture(layers=[0], sites=site))


def test_sites_that_a_model_lacks_are_refused_by_name(tmp_path: Path) -> None:
    """Granite scales what it adds, outside any module."""
    import transformers as hf

    config = hf.GraniteConfig(
        vocab_size=tiny.VOCAB, hidden_size=tiny.HIDDEN, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
        residual_multiplier=0.5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    hf.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    held = ["resid_pre", "resid_mid", "mlp_in", "resid_post"]
    with engine(tmp_path, midstream={"sites": held}) as llm:
        output = llm.generate(tokens(PROMPT), greedy(2), capture=Capture(layers=[0], sites=held))
        assert {site for site, _ in output[0].activations} == set(held)
        for site in ("attn_out", "mlp_out"):
            with pytest.raises(SpecError, match=rf"{site}.*scaled where it is added"):
                llm.generate(tokens(PROMPT), greedy(2), capture=Capture(layers=[0], sites=site))


@pytest.mark.model
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_smollm2_reads_and_edits_as_hooks_in_transformers(
    eager: bool, smollm2: Path, smollm2_cases: tuple[list[int], list[Case]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    prompt, wanted = smollm2_cases
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    with engine(smollm2, enforce_eager=eager, midstream={"sites": list(NAMES)}) as llm:
        check(llm, prompt, wanted, NAMES)


@pytest.fixture(scope="module")
def smollm2_cases(smollm2: Path) -> tuple[list[int], list[Case]]:
    from transformers import AutoTokenizer

    prompt = AutoTokenizer.from_pretrained(smollm2)("The capital of France is the").input_ids
    oracle = Oracle(smollm2, "model.layers", "post_attention_layernorm", branches=Branches())
    return prompt, cases(oracle, prompt)


def test_the_sites_are_different_places_and_add_up(tiny_llama: Path) -> None:
    """The tests above would pass for any sites if the oracle confused them."""
    oracle = Oracle(tiny_llama, "model.layers", "post_attention_layernorm", branches=Branches())
    _, seen = oracle.run(PROMPT)
    for layer in range(3):
        pre, mid, post = (seen[f"resid_{part}", layer] for part in ("pre", "mid", "post"))
        torch.testing.assert_close(pre + seen["attn_out", layer], mid)
        torch.testing.assert_close(mid + seen["mlp_out", layer], post)
        assert relative_error(seen["mlp_in", layer], mid) > 0.01
        assert relative_error(seen["mlp_in", layer], seen["mlp_out", layer]) > 0.01
