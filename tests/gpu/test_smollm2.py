"""SmolLM2 on a GPU in bfloat16, torch.compile and CUDA graphs on, against transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import ALL_SITES, generated, greedy, tokens
from helpers.oracle import Oracle, relative_error

from midstream import Capture, Steer

TOLERANCE = 0.02
PROMPT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
EVERYTHING = Capture(layers="all", sites=ALL_SITES)


@pytest.fixture(scope="module")
def prompt(smollm2: Path) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(smollm2)(PROMPT).input_ids)


def test_graphs_and_compilation_are_on_and_the_runner_is_the_one_asked_for(
    gpu_llm: Any, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.compilation.counter import compilation_counter

    config = gpu_llm.llm_engine.vllm_config
    wanted = "v1" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else "v2"
    assert gpu_llm._front_end.info.workers[0]["runner"] == wanted
    assert config.compilation_config.mode == 3
    assert config.compilation_config.cudagraph_mode.name == "FULL_AND_PIECEWISE"
    assert compilation_counter.num_cudagraph_captured > 0
    # A step of the kind that captures and steers is a replay: no Python of a layer runs.
    gpu_llm.generate(tokens(prompt), greedy(2), use_tqdm=False)

    def refuse(*_args: Any) -> None:
        raise AssertionError("a layer's Python ran in a step that should be a graph's replay")

    monkeypatch.setattr("midstream.runtime.taps._fire", refuse)
    gpu_llm.generate(tokens(prompt), greedy(4), capture=EVERYTHING, use_tqdm=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_site_of_every_layer_is_within_two_percent_of_transformers(
    gpu_llm: Any, prompt: list[int], smollm2: Path, dtype: torch.dtype
) -> None:
    output = gpu_llm.generate(tokens(prompt), greedy(12), capture=EVERYTHING, use_tqdm=False)[0]
    oracle = Oracle(smollm2, "model.layers", "post_attention_layernorm", dtype)
    _, seen = oracle.run([*prompt, *generated(output)][:-1])
    assert set(output.activations) == set(seen)
    errors = {tap: relative_error(output.activations[tap], value) for tap, value in seen.items()}
    worst = max(errors, key=lambda tap: errors[tap])
    assert errors[worst] <= TOLERANCE, f"{worst}: {errors[worst]}"


@pytest.mark.parametrize("site", ALL_SITES)
def test_steering_gives_what_the_same_edit_by_hook_gives(
    gpu_llm: Any, prompt: list[int], smollm2: Path, site: str
) -> None:
    from helpers.oracle import HookEdit

    vector = torch.randn(576, generator=torch.Generator().manual_seed(3))
    steer = Steer(vector, layer=12, site=site, scale=2.0)
    output = gpu_llm.generate(
        tokens(prompt), greedy(12), capture=EVERYTHING, steer=[steer], use_tqdm=False
    )[0]
    oracle = Oracle(smollm2, "model.layers", "post_attention_layernorm")
    edit = HookEdit(site, 12, vector, 2.0, lambda _: True)
    _, seen = oracle.run([*prompt, *generated(output)][:-1], [edit])
    for tap, value in seen.items():
        error = relative_error(output.activations[tap], value)
        assert error <= TOLERANCE, f"{tap}: {error}"
    assert output.receipt.edited.applied == len(prompt) + 11


def test_in_one_mixed_batch_every_request_gets_what_it_gets_alone(
    gpu_llm: Any, prompt: list[int]
) -> None:
    """Prompts of many lengths, chunked (a step has 256 tokens), steered, captured, or plain."""
    draw = torch.Generator().manual_seed(5)
    prompts, steers, captures = [], [], []
    for nth in range(40):
        length = int(torch.randint(3, 90, (1,), generator=draw))
        prompts.append(tokens((prompt * 9)[nth % 7 : nth % 7 + length]))
        vector = torch.randn(576, generator=draw)
        phase = ("all", "prompt", "generated")[nth % 3]
        site = ALL_SITES[nth % 3]
        steered = nth % 4 in (1, 3)
        steers.append([Steer(vector, layer=nth % 29, site=site, phase=phase)] if steered else None)
        captures.append(Capture(layers=[nth % 29, 29]) if nth % 4 in (2, 3) else None)
    together = gpu_llm.generate(
        prompts, greedy(20), capture=captures, steer=steers, use_tqdm=False
    )
    for nth, output in enumerate(together):
        alone = gpu_llm.generate(
            prompts[nth], greedy(20), capture=captures[nth],
            steer=None if steers[nth] is None else steers[nth], use_tqdm=False,
        )[0]  # fmt: skip
        # bfloat16 sums depend on the batch's shape: greedy ties may fall either way, so what is
        # compared is everything computed from the same tokens.
        same = 0
        for one, other in zip(generated(output), generated(alone), strict=True):
            if one != other:
                break
            same += 1
        assert same >= 1
        if captures[nth] is None:
            assert output.activations is None
            continue
        rows = len(prompts[nth]["prompt_token_ids"]) + same
        for tap, value in output.activations.items():
            error = relative_error(value[:rows], alone.activations[tap][:rows])
            assert error <= TOLERANCE, f"request {nth}, {tap}: {error}"


def test_plain_requests_are_untouched_after_all_this(gpu_llm: Any, prompt: list[int]) -> None:
    before = gpu_llm.generate(tokens(prompt), greedy(16), use_tqdm=False)[0]
    vector = [50.0] * 576
    gpu_llm.generate(tokens(prompt), greedy(16), steer=[Steer(vector, layer=5)], use_tqdm=False)
    after = gpu_llm.generate(tokens(prompt), greedy(16), use_tqdm=False)[0]
    assert generated(before) == generated(after)


def test_nothing_is_left_on_the_workers(gpu_llm: Any) -> None:
    gpu_llm._front_end._call("check_integrity")


def test_hidden_states_of_many_steps_arrive_while_the_ring_goes_round(
    gpu_llm: Any, prompt: list[int], smollm2: Path
) -> None:
    """64 sequences for 40 steps at every layer: more rows than a small ring would hold."""
    outputs = gpu_llm.generate(
        [tokens(prompt[: 5 + nth % 12]) for nth in range(64)],
        greedy(40),
        capture=EVERYTHING,
        use_tqdm=False,
    )
    oracle = Oracle(smollm2, "model.layers", "post_attention_layernorm")
    for output in outputs[::13]:
        used = len(output.prompt_token_ids)
        _, seen = oracle.run([*output.prompt_token_ids, *generated(output)][:-1])
        for tap, value in seen.items():
            assert output.activations[tap].shape[0] == used + 39
            assert relative_error(output.activations[tap], value) <= 2 * TOLERANCE
