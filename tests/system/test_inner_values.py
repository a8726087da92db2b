"""Places of the sites inside attention and the MLP: what they hold in tiny models that vLLM runs,
against transformers.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.engines import HAS_GPU
from support.own_process import python
from system.inner_models import ORDER

from midstream.runtime.models.inner_sites import EXPERTS, SITES

TOLERANCE = 1e-5
BACKEND = {"phi", "gpt_neox", "olmo2"}  # on vLLM's Transformers backend from 0.32 on
NO_ROPE = {"gpt2", "opt"}
UNGATED = {"gpt2", "opt", "phi", "gpt_neox", "falcon"}
MIXTURES = {"mixtral", "qwen3_moe"}


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    if HAS_GPU:
        pytest.skip("the models are run on the CPU, which this build of vLLM does not")
    folder = tmp_path_factory.mktemp("inner")
    out = python("-m", "system.inner_models", folder, timeout=300)
    found: dict[str, dict[str, Any]] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("name", ORDER)
def test_the_places_hold_what_transformers_has(
    name: str, examined: dict[str, dict[str, Any]]
) -> None:
    found = examined[name]
    assert set(found) == set(SITES)
    errors = {site: error for site, error in found.items() if isinstance(error, float)}
    assert all(error < TOLERANCE for error in errors.values()), errors
    attention = {"q", "k", "v", "z"}
    if name not in NO_ROPE | {"falcon"}:
        attention |= {"rot_q", "rot_k"}
    expected = set() if name in BACKEND else attention
    if name not in MIXTURES | {"olmo2"}:
        expected |= {"mlp_pre", "mlp_act"} | (set() if name in UNGATED else {"mlp_pre_linear"})
    if name in MIXTURES:
        expected.add("router")
    assert expected <= set(errors), found


@pytest.mark.nightly
def test_sites_are_lacking_with_a_reason(examined: dict[str, dict[str, Any]]) -> None:
    assert examined["gpt2"]["rot_q"] == "this layer has no rotary embedding; use q"
    assert examined["gpt2"]["mlp_pre_linear"] == "this MLP has no gate"
    assert examined["mixtral"]["mlp_act"] == EXPERTS
    assert examined["llama"]["router"] == "this layer has no experts"
