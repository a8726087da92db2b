"""Promises of the projects that midstream started from, on engines that tests share.

The table of all promises is `support/seed_rows.py`, which names the tests that show the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.engines import generated, greedy, tokens
from support.oracle import Branches, HookEdit, Oracle
from support.seed_rows import HERE, ROWS

import midstream
from midstream import Capture, Gate, Probe, SamplingParams, Steer
from midstream.codecs import Rp8

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [9, 41, 7, 150, 66, 12]
COUNT = 5
LONG = list(range(3, 103))  # 100 tokens: three blocks of 32 and a part of one
_DRAW = torch.Generator().manual_seed(5)
U, V, W = (torch.randn(tiny.HIDDEN, generator=_DRAW) * 2 for _ in range(3))


def shows(*rows: str) -> Callable[[Any], Any]:
    """Name the rows that a test shows; `tests/repo/test_seed_rows.py` reads them."""
    assert all(ROWS[row][1] == HERE for row in rows)
    return lambda function: function


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> Oracle:
    return Oracle(tiny_llama, "model.layers", "post_attention_layernorm", branches=Branches())


def ask(llm: Any, prompt: list[int] = PROMPT, params: Any = None, **asked: Any) -> Any:
    params = params or greedy(COUNT, detokenize=False)
    return llm.generate(tokens(prompt), params, use_tqdm=False, **asked)[0]


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- the repository


@shows("S1.1", "S1.3", "S1.11", "S1.12", "S1.19", "S1.21", "S1.22")
def test_the_repository_has_what_the_readmes_name() -> None:
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
def test_the_engines_are_vllms_with_arguments_added() -> None:
    import vllm

    assert issubclass(midstream.LLM, vllm.LLM)
    assert isinstance(SamplingParams(n=1, temperature=0.7, top_p=0.95), vllm.SamplingParams)
    for name in ("generate", "chat"):
        theirs = inspect.signature(getattr(vllm.LLM, name)).parameters
        ours = inspect.signature(getattr(midstream.LLM, name)).parameters
        positional = [one for one in theirs.values() if one.kind is one.POSITIONAL_OR_KEYWORD][:3]
        assert [one.name for one in positional] == list(ours)[: len(positional)]


# ---------------------------------------------------------------- captures


@shows("S0.1", "S0.3", "S1.4", "S1.5", "S1.13", "S2.6", "S2.35", "S4.21", "S4.9", "S4.16")
def test_rows_of_all_tokens_are_those_of_one_forward_pass(wide: Any, oracle: Oracle) -> None:
    engine = wide.llm_engine
    step, steps = engine.step, 0

    def counted() -> Any:
        nonlocal steps
        steps += 1
        return step()

    engine.step = counted
    try:
        plain = ask(wide)
        without, steps = steps, 0
        captures = [
            Capture("all", ["pre_attn", "post_attn"]),
            Capture(0, "post_block"),
            Capture([1, 2], "post_mlp"),
            Capture(0, "mlp_in", "last_prompt"),
            Capture(1, "mlp_in", "generated"),
            Capture(2, "mlp_in", [0, 3]),
        ]
        found = ask(wide, capture=[captures])
        assert steps == without, "no token is computed twice"
    finally:
        engine.step = step
    assert generated(found) == generated(plain)
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


@shows("S0.7", "S1.7", "S1.16")
def test_an_mlps_output_comes_as_its_largest_values(wide: Any) -> None:
    every = ask(wide, capture=Capture(1, "mlp_out"))
    top = ask(wide, capture=Capture(1, "mlp_out", codec="topk8:k=8"))
    rows, found = every.activations["mlp_out", 1], top.activations["mlp_out", 1]
    kept = rows.abs().topk(8).indices.sort().values
    mine = torch.stack([row.nonzero().flatten()[:8] for row in found])
    assert torch.equal(mine, kept)
    picked, exact = found.gather(1, kept), rows.gather(1, kept)
    step = (exact.max(1).values - exact.min(1).values) / 255
    assert ((picked - exact).abs() <= step[:, None] * 0.51 + 1e-5).all()
    for width in (256, 512):
        assert Rp8(width).row_bytes(4096, torch.bfloat16) < 4096 / 4


# ---------------------------------------------------------------- steering


@shows("S2.1", "S2.24", "S4.12", "S4.13", "S4.6", "S4.15")
def test_vectors_of_a_request_are_added_where_they_should_be(wide: Any, oracle: Oracle) -> None:
    def params(**asked: Any) -> Any:
        return SamplingParams(
            temperature=0, max_tokens=COUNT, ignore_eos=True, detokenize=False,
            capture=Capture("all"), **asked,
        )  # fmt: skip

    def is_prompt(position: int) -> bool:
        return position < len(PROMPT)

    first = HookEdit("resid_post", 1, U, 2.0, lambda _: True)
    before = HookEdit("resid_post", 0, V, 1.0, is_prompt)
    after = HookEdit("resid_pre", 2, W, 1.0, lambda position: not is_prompt(position))
    vectors = {"post_block": {1: {"vector": U, "scale": 2.0}}}
    cases: list[tuple[dict[str, Any], tuple[HookEdit, ...]]] = [
        ({}, ()),
        ({"steering_vectors": vectors}, (first,)),
        ({"prefill_steering_vectors": {"post_block": {0: V}}}, (before,)),
        ({"decode_steering_vectors": {"pre_attn": {2: W}}}, (after,)),
        (
            {
                "steering_vectors": vectors,
                "prefill_steering_vectors": {"post_block": {0: V}},
                "decode_steering_vectors": {"pre_attn": {2: W}},
            },
            (first, before, after),
        ),
        ({"steering_vectors": {"post_block": {1: {"vector": U, "scale": 0.0}}}}, ()),
    ]
    # One batch: each request gets its own.
    outputs = wide.generate(
        [tokens(PROMPT)] * len(cases), [params(**asked) for asked, _ in cases], use_tqdm=False
    )
    for output, (_, edits) in zip(outputs, cases, strict=True):
        every = [*PROMPT, *generated(output)][:-1]
        _, theirs = oracle.run(every, edits)
        for layer in range(tiny.LAYERS):
            assert_close(output.activations["resid_post", layer], theirs["resid_post", layer])
    plain, steered = outputs[0], outputs[1]
    assert not torch.equal(plain.activations["resid_post", 2], steered.activations["resid_post", 2])


@shows("S4.8")
def test_server_wide_vectors_shift_the_output_until_they_are_cleared(wide: Any) -> None:
    capture = Capture("all")
    before = ask(wide, capture=capture)
    wide.steering.set(base={"post_block": {1: U}})
    steered = ask(wide, capture=capture)
    wide.steering.clear()
    after = ask(wide, capture=capture)
    assert not torch.equal(
        steered.activations["resid_post", 2], before.activations["resid_post", 2]
    )
    assert generated(after) == generated(before)
    for tap, rows in before.activations.items():
        assert torch.equal(after.activations[tap], rows)


@shows("S2.40")
def test_what_is_read_of_a_request_decides_how_later_ones_are_steered(
    wide: Any, oracle: Oracle
) -> None:
    scores = [
        float(ask(wide, prompt, probes=Probe(V, 1, name="p")).probes["p"][-1])
        for prompt in (PROMPT, PROMPT[::-1])
    ]
    threshold = sum(scores) / 2
    assert min(scores) < threshold
    for score in scores:
        vector = U if score > threshold else W
        wide.steering.set(base={"post_block": {1: vector}})
        later = ask(wide, capture=Capture("all"))
        wide.steering.clear()
        edit = HookEdit("resid_post", 1, vector, 1.0, lambda _: True)
        _, theirs = oracle.run([*PROMPT, *generated(later)][:-1], (edit,))
        for layer in range(tiny.LAYERS):
            assert_close(later.activations["resid_post", layer], theirs["resid_post", layer])


@shows("S2.42", "S2.43", "S3.28")
def test_a_monitor_scores_tokens_and_opens_a_tier_in_the_same_forward_pass(
    wide: Any, oracle: Oracle
) -> None:
    every = [*PROMPT, *generated(ask(wide))]
    _, theirs = oracle.run(every[:-1])
    scores = theirs["resid_post", 0] @ V
    threshold, sharpness = float(scores[: len(PROMPT)].median()), 0.7
    gate = Gate(
        Steer(U, 1, 1.5), {"direction": V, "layer": 0}, threshold=threshold, sharpness=sharpness
    )
    wide.steering.set(base=gate)
    found = ask(
        wide, params=greedy(1, detokenize=False), capture=Capture(1), probes=Probe(V, 0, name="p")
    )
    assert_close(found.probes["p"], scores[: len(PROMPT)])
    opened = torch.sigmoid(sharpness * (scores - threshold))[: len(PROMPT), None]
    expected = theirs["resid_post", 1][: len(PROMPT)] + 1.5 * opened * U
    assert_close(found.activations["resid_post", 1], expected)


# ---------------------------------------------------------------- the prefix cache


@shows("S2.16", "S2.17", "S4.24")
def test_the_prefix_cache_serves_what_neither_is_edited_nor_read(llm: Any) -> None:
    def cached(**asked: Any) -> int:
        return int(ask(llm, LONG, greedy(3, detokenize=False), **asked).num_cached_tokens)

    assert cached() == 0
    assert cached(steer=Steer(U, 1, phase="generated")) == 96
    assert cached(steer=Steer(U, 1, positions=slice(64, None))) == 64
    assert cached(steer=Steer(U, 1)) == 0
    assert cached(capture=Capture(1, positions="generated")) == 96
    assert cached(capture=Capture(1, positions=[70])) == 64
    assert cached(capture=Capture(1, positions="last_prompt")) == 96
    assert cached(capture=Capture(1, positions="prompt")) == 0
