"""All sites of every layer against transformers with plain hooks: read, and edited by addition."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from engine.asking import ask_all
from safetensors.torch import load_file
from support import tiny
from support.engines import engine, generated, greedy, tokens
from support.oracle import Branches, HookEdit, Oracle, relative_error
from support.pool import Pool
from torch import Tensor

from midstream import Capture, Steer
from midstream.errors import SpecError
from midstream.sites import OUTER

TOLERANCE = 1e-4
MAX_TOKENS = 3
# Compiling takes long: at night one of each layout, as the others' are laid out like one of these
# (qwen2, qwen3 and phi3 like llama, gemma2 like gemma3, opt like gpt2). By day `test_inner_sites`
# compiles a llama with all sites.
COMPILED = ("llama", "gpt2", "gemma3", "mixtral", "phi")
VARIANTS = [
    *((name, True) for name in tiny.MODELS),
    *(pytest.param(name, False, marks=pytest.mark.nightly) for name in COMPILED),
]
EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
SANDWICH = Branches(attn_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm")
BRANCHES = {
    "gemma2": SANDWICH,
    "gemma3": SANDWICH,
    "gpt2": Branches(attn_in="attn", attn_out="attn"),
    "opt": Branches(mlp_in="fc1", mlp_out="fc2"),
}


class Scenario(NamedTuple):
    """One request and what transformers makes of it."""

    name: str
    steer: Steer | None
    expected_tokens: list[int]
    expected: dict[tuple[str, int], Tensor]


def scenarios(oracle: Oracle, prompt: list[int]) -> list[Scenario]:
    """The plain request, and edits at each site, as long as the stream is there: on every token
    at one layer, and in each of the other ways in turn at another.
    """
    size, last = len(prompt), oracle.num_layers - 1
    places = [1, size - 1, size + 1]
    ways: list[tuple[str, dict[str, Any], Callable[[int], bool]]] = [
        ("prompt", {"phase": "prompt"}, lambda p: p < size),
        ("generated", {"phase": "generated"}, lambda p: p >= size),
        ("positions", {"positions": [1, -1, size + 1]}, places.__contains__),
    ]
    _, plain = oracle.run(prompt)
    draw = torch.Generator().manual_seed(7)
    edits: list[tuple[str, Steer | None, list[HookEdit]]] = [("plain", None, [])]
    for nth, site in enumerate(oracle.sites):
        for layer, (name, asked, where) in (
            (nth % (last + 1), ("all", {}, lambda p: True)),
            (last // 2, ways[nth % 3]),
        ):
            vector = torch.randn(oracle.model.config.hidden_size, generator=draw)
            vector *= plain[site, layer].norm(dim=-1).median() / vector.norm()
            steer = Steer(vector, layer, 1.5, site=site, **asked)
            hook = HookEdit(site, layer, vector, 1.5, where)
            edits.append((f"{name} at {site} of layer {layer}", steer, [hook]))
    found = []
    for name, steer, hooks in edits:
        chosen = oracle.generate(prompt, MAX_TOKENS, hooks)
        _, seen = oracle.run([*prompt, *chosen][:-1], hooks)
        found.append(Scenario(name, steer, chosen, seen))
    return found


def check(llm: Any, prompt: list[int], cases: list[Scenario], sites: tuple[str, ...]) -> None:
    """All scenarios as one batch, and each of them equal to what transformers does."""
    steers = [case.steer and [case.steer] for case in cases]
    capture = Capture(layers="all", sites=sites)
    outputs = ask_all(llm, [prompt] * len(cases), MAX_TOKENS, capture=capture, steer=steers)
    for case, output in zip(cases, outputs, strict=True):
        assert generated(output) == case.expected_tokens, case.name
        found = output.activations
        assert set(found) == set(case.expected)
        assert found.positions.tolist() == list(range(len(prompt) + MAX_TOKENS - 1))
        assert found.token_ids.tolist() == [*prompt, *case.expected_tokens][:-1]
        for tap, expected in case.expected.items():
            error = relative_error(found[tap], expected)
            assert error < TOLERANCE, f"{tap} with {case.name}: {error}"
        assert output.receipt.status == "ok"
        if case.steer is not None:
            assert output.receipt.edited.applied == output.receipt.edited.expected > 0
    plain, *steered = cases
    assert any(case.expected_tokens != plain.expected_tokens for case in steered), "too weak"
    last = "resid_post", max(layer for _, layer in plain.expected)
    for case in steered:
        if case.name.startswith("all"):
            rows = [one.expected[last][: len(prompt)] for one in (case, plain)]
            assert relative_error(*rows) > 0.01, f"{case.name} changes nothing: it tests nothing"


def check_parameters(llm: Any, model: Path, layers: str) -> None:
    """Each parameter outside the layers is that of the checkpoint, by the name it has there."""
    stored = load_file(model / "model.safetensors")
    found = {name: value for name, value in stored.items() if not name.startswith(f"{layers}.")}
    (embedding,) = [value for name, value in found.items() if name.endswith(EMBEDDINGS)]
    found.setdefault("lm_head.weight", embedding)  # models without it have tied it
    for name, value in found.items():
        torch.testing.assert_close(llm.parameter(name), value, rtol=0, atol=0)
    with pytest.raises(SpecError, match=rf"'{layers}.0.x' outside.*lm_head.weight"):
        llm.parameter(f"{layers}.0.x")


PROMPT = [5, 17, 33, 101, 8, 77, 54, 23, 9, 150, 44]


@functools.cache
def reference(name: str, folder: Path) -> tuple[Path, tuple[str, ...], list[Scenario]]:
    """A tiny model, its sites, and what transformers makes of each request."""
    spec = tiny.MODELS[name]
    model = tiny.make(name, folder)
    oracle = Oracle(model, spec.layers, spec.mid, branches=BRANCHES.get(name, Branches()))
    assert set(OUTER) - set(oracle.sites) == ({"resid_mid"} if spec.mid is None else set())
    return model, oracle.sites, scenarios(oracle, PROMPT)


@pytest.mark.parametrize(("name", "eager"), VARIANTS)
def test_every_site_of_every_layer_reads_and_edits_as_hooks_in_transformers(
    name: str,
    eager: bool,
    tiny_models: Path,
    tmp_path: Path,
    pool: Pool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "mixtral":
        pool.close()  # experts need groups of processes that vLLM makes for such a model only
    # vLLM changes transformers' own classes for some models: the reference comes first.
    model, sites, cases = reference(name, tiny_models)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    settings = {"sites": list(sites)}
    with engine(model, enforce_eager=eager, inductor=True, midstream=settings) as llm:
        check(llm, PROMPT, cases, sites)
        for site in set(OUTER) - set(sites):
            with pytest.raises(SpecError, match=rf"{site}.*in parallel"):
                llm.generate(tokens(PROMPT), greedy(2), capture=Capture(layers=[0], sites=site))
        check_parameters(llm, model, tiny.MODELS[name].layers)
