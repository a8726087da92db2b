"""Sums of reduced rows and what gates remember are kept by each rank for what it has of them, and
doses of edits are those of the whole vectors.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import ask, ask_all
from support import dose_oracle
from support.cached_pair import vector
from support.engines import ALL_SITES, engine, generated
from support.oracle_edits import PLACES, EditOracle
from support.ranks import PIPELINE, ranks

from midstream import Capture, Gate, Probe, Steer
from midstream.errors import SpecError

SITES = ["resid_post", "z", "mlp_act"]  # the last two are split over tensor-parallel ranks
SETTINGS: dict[str, Any] = {
    "block_size": 32,
    "max_num_batched_tokens": 48,
    "midstream": {"sites": [*ALL_SITES, *SITES[1:]], "gate_states": 4, "doses": 64},
}
PROMPT = [(13 * nth) % 190 + 3 for nth in range(100)]
KINDS = ("mean", "max", "moments")
WAYS = [{"tensor_parallel_size": 2}, PIPELINE]


def asked() -> list[dict[str, Any]]:
    steer = Steer(vector(1, 0.3), layer=1)
    gate = Gate(steer, Probe(vector(2), 0), 0.0, smooth=0.02, sharpness=0.5)
    reduced = [{"capture": Capture("all", SITES, "prompt", reduce=kind)} for kind in KINDS]
    return [*reduced, {"edits": gate, "capture": Capture("all", positions=slice(96, None))}]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[Any]:
    with engine(tiny_llama, **SETTINGS, enable_prefix_caching=False) as llm:
        return [ask(llm, PROMPT, **plan) for plan in asked()]


@pytest.fixture(scope="module", params=WAYS, ids=["tensor", "stages"])
def several(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Any]:
    midstream = {**SETTINGS["midstream"], "max_dose": 1e6, "check_ranks": True}
    given = {**SETTINGS, **request.param, "midstream": midstream}
    with ranks(tiny_llama, **given, enable_prefix_caching=True) as llm:
        yield llm


def test_a_cached_prompt_has_the_results_of_an_engine_of_one_rank_without_a_cache(
    several: Any, expected: list[Any]
) -> None:
    for plan, wanted in zip(asked(), expected, strict=True):
        for hit in (0, 96):
            output = ask(several, PROMPT, **plan)
            assert output.num_cached_tokens == hit
            assert output.receipt.status == "ok"
            assert generated(output) == generated(wanted)
            for tap, values in wanted.activations.items():
                found = output.activations[tap]
                torch.testing.assert_close(found, values, rtol=1e-3, atol=1e-4)


def test_doses_over_two_ranks_are_those_of_plain_hooks(several: Any, tiny_llama: Path) -> None:
    oracle = EditOracle(tiny_llama, PLACES["llama"])
    prompts = [PROMPT[:70], PROMPT[:9]]
    kinds = [dose_oracle.each_kind(len(prompt)) for prompt in prompts]
    assert several.reset_prefix_cache()
    outputs = ask_all(several, prompts, 5, edits=[[at.edit for at in of] for of in kinds])
    for output, prompt, of_prompt in zip(outputs, prompts, kinds, strict=True):
        assert output.receipt.status == "ok"
        dose_oracle.assert_doses(output, prompt, of_prompt, oracle)
    if several.info.workers[-1].tensor_rank:
        split = Steer(dose_oracle.vector(1), 1, site="z", scale=0.1)
        with pytest.raises(SpecError, match=r"edits\[0\].*z is split over 2 ranks.*max_dose"):
            ask(several, prompts[1], 4, edits=[split])
