"""Mistakes of newcomers that no module's own tests show: each is rejected with what to write."""

from __future__ import annotations

import asyncio
import multiprocessing
import re
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refused_calls
from vllm import envs

from midstream import Ablate, AsyncLLM, Capture, Steer
from midstream.api.sampling_params import SamplingParams
from midstream.errors import ScaleWarning, SpecError, UnsupportedError
from midstream.plan import Plan
from midstream.plan.operations import steer as steer_module
from midstream.results.activations import Activations
from midstream.runtime.frontend.request.call_plan import merged_plan
from midstream.runtime.vllm.engine_rules import check_script
from midstream.sae.sae import SAE

V = np.arange(1.0, 9.0)
E = Steer(V, 1)


def to_async(**given: Any) -> None:
    asyncio.run(anext(AsyncLLM.generate(SimpleNamespace(_started=None), "abc", None, **given)))


def rows() -> Activations:
    """Rows of layers 3 and 29, as captured."""
    values = {("resid_post", layer): torch.ones(4, 8) for layer in (3, 29)}
    return Activations(values, dict.fromkeys(values, torch.arange(4)), [5] * 4, 30)


def loud() -> None:
    """Steer with a scale that drowns the stream, in a process that was not warned yet."""
    steer_module._has_warned = False
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScaleWarning)
        Steer(V, 3, 1e8)


def test_a_mistake_is_rejected_with_what_to_write() -> None:
    capture, example = Capture(3), re.escape("Steer(vector, layer=14)")
    function = re.escape("a function is called by Local(fn, layer=14)")
    refused_calls(
        (lambda: Plan.make(edits=V), "write for example " + example),
        (lambda: Plan.make(edits=(V, 14)), example),
        (lambda: Plan.make(edits=lambda h: h), f"{function}.*{example}"),
        (lambda: to_async(hooks=[]), "capture=… to read them"),
        (lambda: SamplingParams(steer=E), re.escape("mean edits=Steer(vector, layer=…)?")),
        (lambda: Capture(3, positions="last_token"), 'use "last_prompt" for the last token of the'),
        (lambda: Capture(3, tokens=[0]), "did you mean `positions`"),
        (
            lambda: merged_plan(Plan.make(capture=capture), SamplingParams(capture=capture)),
            "give it in one place",
        ),
        (
            lambda: SAE.load("gemma-scope-2b-pt-res-canonical"),
            "cfg.json.*give its id too: SAE.load",
        ),
    )
    refused_calls((loud, r"1.43e\+09.*norm=\"match\""), error=ScaleWarning)
    refused_calls((lambda: rows()["resid-post"], "mean `resid_post`"), error=KeyError)


def test_a_layer_is_meant_by_its_digits() -> None:
    assert Steer({"14": V}).layers.indices == (14,)
    assert Ablate({"-1": V}).layers.indices == (-1,)
    with pytest.raises(SpecError, match="layer 14 is listed twice"):
        Steer({"14": V, 14: V})
    for key in ("014", "1.0", "+1", "", "1" * 5000, "¹"):
        with pytest.raises(SpecError, match="unknown field"):
            Steer({key: V})


@pytest.fixture
def spawns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines get processes of their own, which import the script."""
    # Not the environment, of which vLLM keeps a copy once an engine has started.
    monkeypatch.setitem(vars(envs), "VLLM_ENABLE_V1_MULTIPROCESSING", True)
    monkeypatch.setitem(vars(envs), "VLLM_WORKER_MULTIPROC_METHOD", "spawn")


@pytest.mark.usefixtures("spawns")
def test_a_script_without_a_guard_ends_the_engines_process_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_script()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit, match="put the script's body under `if __name__ ==") as caught:
        check_script()
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(vars(envs), "VLLM_ENABLE_V1_MULTIPROCESSING", False)
    check_script()


@pytest.mark.usefixtures("spawns")
def test_a_script_from_standard_input_is_rejected_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None, __file__="<stdin>"))
    with pytest.raises(UnsupportedError, match="from standard input; save it as a file"):
        check_script()
    monkeypatch.setitem(vars(envs), "VLLM_ENABLE_V1_MULTIPROCESSING", False)
    check_script()
