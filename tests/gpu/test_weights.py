"""Engines that sleep without their weights, and wake: CUDA graphs of both models, compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.alongside import EVERYTHING, PUSH, check_rows, hooked, push, rows_of
from support.cached_pair import fresh
from support.engines import ALL_SITES, GPU_MEMORY, engine, generated, greedy, tokens
from support.nightly import rounds
from support.oracle import Oracle
from support.reloading import other_weights, reload

from midstream import Capture, Probe

PLACES = ("model.layers", "post_attention_layernorm")
CYCLES = rounds(suite=8, nightly=100)
REUSED = Capture("all", ALL_SITES, reuse=True)


@pytest.fixture(scope="module", params=["startup", "lazy"])
def llm(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Any]:
    """Compiled, with CUDA graphs of both models, or of the tapped one when it is first needed."""
    with engine(
        tiny_llama,
        enforce_eager=False,
        enable_sleep_mode=True,
        enable_prefix_caching=True,
        max_num_batched_tokens=128,
        **GPU_MEMORY,
        midstream={"sites": ALL_SITES, "reuse_bytes": 8 << 20, "tapped_model": request.param},
    ) as found:
        yield found


@pytest.fixture(scope="module")
def weights(tiny_llama: Path, tiny_models: Path) -> list[tuple[Path, Oracle]]:
    other = other_weights(tiny_llama, tiny_models / "slept", 5)
    return [(path, Oracle(path, *PLACES)) for path in (tiny_llama, other)]


def ask(llm: Any, prompt: list[int], **asked: Any) -> Any:
    sampling = greedy(6, detokenize=False)
    return llm.generate([tokens(prompt)], sampling, use_tqdm=False, **asked)[0]


def check(llm: Any, oracle: Oracle, prompt: list[int]) -> int:
    """Ask with each kind of work and without any; return the number of the weights' version."""
    probe = Probe(PUSH, 2, name="p")
    for _ in range(2):
        out = ask(llm, prompt, capture=REUSED, probes=probe)
        rows = rows_of(prompt, generated(out))
        logits = check_rows(oracle, out, rows)
        assert generated(out) == logits[len(prompt) - 1 :].argmax(-1).tolist()
        expected = oracle.run(rows).values["resid_post", 2] @ PUSH
        torch.testing.assert_close(out.probes["p"], expected, rtol=1e-3, atol=1e-3)
        edited = ask(llm, prompt, capture=EVERYTHING, edits=[push()])
        check_rows(oracle, edited, rows_of(prompt, generated(edited)), [hooked()])
        plain = ask(llm, prompt)
        assert generated(plain) == generated(out)
    assert out.receipt.weight_version == llm.weight_version
    number: int = llm.weight_version.number
    return number


def test_cycles_of_sleep_and_reloads_serve_nothing_old(
    llm: Any, weights: list[tuple[Path, Oracle]]
) -> None:
    prompt = fresh(80)
    free = []
    path, oracle = weights[0]
    number = check(llm, oracle, prompt)
    for cycle in range(CYCLES):
        if cycle % 3 == 0:  # the same weights come back
            llm.sleep(level=1)
            llm.wake_up()
            assert check(llm, oracle, prompt) == number
        elif cycle % 3 == 1:  # they are dropped, and others are loaded
            path, oracle = weights[(cycle // 3 + 1) % 2]
            llm.sleep(level=2)
            llm.wake_up(tags=["weights"])
            reload(llm, path)
            llm.wake_up(tags=["kv_cache"])
            assert check(llm, oracle, prompt) == number + 1
            number += 1
        else:  # loaded in place, without sleep and with the prefix cache as it is
            path, oracle = weights[cycle // 3 % 2]
            reload(llm, path)
            assert check(llm, oracle, prompt) == number + 1
            number += 1
        gc.collect()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] > free[len(free) // 2] - (64 << 20)
