"""Promises of the projects that midstream started from; `support/seed_rows.py` has them all."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from engine.asking import ask
from support import tiny
from support.engines import generated
from support.oracle import Branches, HookEdit, Oracle
from support.seed_rows import HERE, ROWS

import midstream
from midstream import Capture, Probe, SamplingParams

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [9, 41, 7, 150, 66, 12]
COUNT = 5


def shows(*rows: str) -> Callable[[Any], Any]:
    """Name the rows that a test shows; `tests/repo/test_seed_rows.py` reads them."""
    assert all(ROWS[row][1] == HERE for row in rows)
    return lambda function: function


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> Oracle:
    return Oracle(tiny_llama, "model.layers", "post_attention_layernorm", branches=Branches())


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@shows("S1.1", "S1.3", "S1.11", "S1.12", "S1.19", "S1.21", "S1.22")
def test_the_repository_has_what_the_readmes_name():
    project = (ROOT / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.10"' in project
    assert 'license = "Apache-2.0"' in project
    for name in (
        "tests/unit", "tests/engine", "tests/system", "benchmarks/layer_scaling.py",
        "docs/benchmarks.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE",
    ):  # fmt: skip
        assert (ROOT / name).exists(), name
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {midstream.__version__}\n" in citation


@shows("S3.3", "S3.8", "S3.11")
def test_the_engines_are_vllms_with_arguments_added():
    import vllm

    assert issubclass(midstream.LLM, vllm.LLM)
    assert isinstance(SamplingParams(n=1, temperature=0.7, top_p=0.95), vllm.SamplingParams)
    for name in ("generate", "chat"):
        theirs = inspect.signature(getattr(vllm.LLM, name)).parameters
        ours = inspect.signature(getattr(midstream.LLM, name)).parameters
        positional = [one for one in theirs.values() if one.kind is one.POSITIONAL_OR_KEYWORD][:3]
        assert [one.name for one in positional] == list(ours)[: len(positional)]


@shows("S0.1", "S0.3", "S1.4", "S1.5", "S1.13", "S2.6", "S2.35", "S4.21", "S4.9", "S4.16")
def test_rows_of_all_tokens_are_those_of_one_forward_pass(wide, oracle):
    captures = [
        Capture("all", ["pre_attn", "post_attn"]),
        Capture(0, "post_block"),
        Capture([1, 2], "post_mlp"),
        Capture(0, "mlp_in", "last_prompt"),
        Capture(1, "mlp_in", "generated"),
        Capture(2, "mlp_in", [0, 3]),
    ]
    engine, steps = wide.llm_engine, []
    for capture in (None, [captures]):
        counted = mock.Mock(wraps=engine.step)
        with mock.patch.object(engine, "step", counted):
            found = ask(wide, PROMPT, COUNT, capture=capture)
        steps.append(counted.call_count)
    assert steps[0] == steps[1], "no token is computed twice"
    every = [*PROMPT, *generated(found)][:-1]
    _, theirs = oracle.run(every)
    for layer in range(tiny.LAYERS):
        for site in ("resid_pre", "resid_mid", "resid_post"):
            rows = found.activations[site, layer]
            assert rows.shape == (len(PROMPT) + COUNT - 1, tiny.HIDDEN)
            assert_close(rows, theirs[site, layer])
    for layer, positions in enumerate(([len(PROMPT) - 1], range(len(PROMPT), len(every)), [0, 3])):
        assert found.activations.positions_of("mlp_in", layer).tolist() == list(positions)
        expected = theirs["mlp_in", layer][list(positions)]
        assert_close(found.activations["mlp_in", layer], expected)
    assert found.capture_results["memory"].status == "ok"
    modules = wide.apply_model(
        lambda model: [
            name
            for name, module in model.named_modules()
            if module._forward_hooks or module._forward_pre_hooks
        ]
    )
    assert modules == [[]], "PyTorch's hooks"


@shows("S2.40")
def test_what_is_read_of_a_request_decides_how_later_ones_are_steered(wide, oracle):
    read, first, second = torch.randn(3, tiny.HIDDEN, generator=torch.Generator().manual_seed(5))
    scores = [
        float(ask(wide, prompt, probes=Probe(read, 1, name="p")).probes["p"][-1])
        for prompt in (PROMPT, PROMPT[::-1])
    ]
    threshold = sum(scores) / 2
    assert min(scores) < threshold
    for score in scores:
        vector = 2 * (first if score > threshold else second)
        wide.steering.set(base={"post_block": {1: vector}})
        later = ask(wide, PROMPT, COUNT, capture=Capture("all"))
        wide.steering.clear()
        edit = HookEdit("resid_post", 1, vector, 1.0, lambda _: True)
        _, theirs = oracle.run([*PROMPT, *generated(later)][:-1], (edit,))
        for layer in range(tiny.LAYERS):
            assert_close(later.activations["resid_post", layer], theirs["resid_post", layer])
