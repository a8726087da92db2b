"""Sums of reduced rows and what gates remember are kept by each rank for what it has of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.cached_pair import vector
from support.engines import engine, generated, greedy
from support.ranks import PIPELINE, ranks

from midstream import Capture, Gate, Probe, Steer

SITES = ["resid_post", "z", "mlp_act"]  # the last two are split over tensor-parallel ranks
SETTINGS: dict[str, Any] = {
    "block_size": 32,
    "max_num_batched_tokens": 48,
    "midstream": {"sites": SITES, "gate_states": 4},
}
PROMPT = [(13 * nth) % 190 + 3 for nth in range(100)]


def asked() -> list[dict[str, Any]]:
    steer = Steer(vector(1, 0.3), layer=1)
    gate = Gate(steer, Probe(vector(2), 0), 0.0, smooth=0.02, sharpness=0.5)
    reduced = [{"capture": Capture("all", SITES, "prompt", reduce=kind)} for kind in KINDS]
    return [*reduced, {"edits": gate, "capture": Capture("all", positions=slice(96, None))}]


KINDS = ("mean", "max", "moments")


def ask(llm: Any, plan: dict[str, Any]) -> Any:
    settings = greedy(4, detokenize=False)
    return llm.generate({"prompt_token_ids": PROMPT}, settings, use_tqdm=False, **plan)[0]


@pytest.mark.parametrize("how", [{"tensor_parallel_size": 2}, PIPELINE], ids=["tensor", "stages"])
def test_a_cached_prompt_has_the_results_of_an_engine_of_one_rank_without_a_cache(
    tiny_models: Path, how: dict[str, Any]
) -> None:
    path = tiny.make("llama", tiny_models)
    with engine(path, **SETTINGS, enable_prefix_caching=False) as llm:
        expected = [ask(llm, plan) for plan in asked()]
    with ranks(path, **SETTINGS, **how, enable_prefix_caching=True) as llm:
        for plan, wanted in zip(asked(), expected, strict=True):
            for hit in (0, 96):
                output = ask(llm, plan)
                assert output.num_cached_tokens == hit
                assert output.receipt.status == "ok"
                assert generated(output) == generated(wanted)
                for tap, values in wanted.activations.items():
                    found = output.activations[tap]
                    torch.testing.assert_close(found, values, rtol=1e-3, atol=1e-4)
