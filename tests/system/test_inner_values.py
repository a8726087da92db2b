"""Places of the sites inside attention and the MLP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.engines import HAS_GPU
from support.own_process import python

from midstream.runtime.models.inner_sites import SITES

TOLERANCE = 1e-5
BACKEND = {"phi", "gpt_neox", "olmo2"}  # on vLLM's Transformers backend from 0.32 on
UNGATED = {"phi", "gpt_neox", "falcon"}


@pytest.mark.nightly
def test_the_places_hold_what_transformers_has(tmp_path: Path) -> None:
    if HAS_GPU:
        pytest.skip("the models are run on the CPU, which this build of vLLM does not")
    out = python("-m", "system.inner_models", tmp_path, timeout=300)
    for name, found in json.loads(out.splitlines()[-1]).items():
        assert set(found) == set(SITES), name
        errors = {site: error for site, error in found.items() if isinstance(error, float)}
        assert all(error < TOLERANCE for error in errors.values()), (name, errors)
        expected = set() if name in BACKEND else {"q", "k", "v", "z"}
        if expected and name != "falcon":
            expected |= {"rot_q", "rot_k"}
        if name != "olmo2":
            expected |= {"mlp_pre", "mlp_act"} | (set() if name in UNGATED else {"mlp_pre_linear"})
        assert expected <= set(errors), (name, found)
