"""Mistakes of newcomers that no module's own tests show: each is rejected with what to write."""

import asyncio
import multiprocessing
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.refusals import refused_calls
from unit.store.making import entry, write
from vllm import envs

from midstream import (
    LLM,
    Ablate,
    AsyncLLM,
    Capture,
    Directions,
    Gate,
    Lens,
    Probe,
    Steer,
    open_store,
)
from midstream.api.sampling_params import SamplingParams
from midstream.errors import ConfigError, ScaleWarning, SpecError, StoreError, UnsupportedError
from midstream.lab.fit.scores import LayerScore
from midstream.lab.sweep import Sweep
from midstream.plan import ModelShape, Plan
from midstream.plan.operations import steer as steer_module
from midstream.results.activations import Activations
from midstream.runtime.frontend.request.call_plan import merged_plan
from midstream.runtime.frontend.request.prompt.inputs import conversations
from midstream.runtime.vllm.engine_rules import check_script
from midstream.sae.sae import SAE
from midstream.steering import VectorRegistry

V = np.arange(1.0, 9.0)
E = Steer(V, 1)


def to_async(**given: Any) -> None:
    asyncio.run(anext(AsyncLLM.generate(SimpleNamespace(_started=None), "abc", None, **given)))


def rows() -> Activations:
    """Rows of layers 3 and 29, as captured."""
    values = {("resid_post", layer): torch.ones(4, 8) for layer in (3, 29)}
    return Activations(values, dict.fromkeys(values, torch.arange(4)), [5] * 4, 30)


def to_async_with(params: Any) -> None:
    asyncio.run(anext(AsyncLLM.generate(SimpleNamespace(_started=None), "abc", params)))


def directions() -> Directions:
    return Directions(np.ones((2, 8), np.float32), (3, 4), scores={3: LayerScore(0.9, 0.8, 2.0)})


def sweep() -> Sweep:
    """A sweep that is only to be saved."""
    return object.__new__(Sweep)


def loud() -> None:
    """Steer with a scale that drowns the stream, in a process that was not warned yet."""
    steer_module._has_warned = False
    with warnings.catch_warnings():
        warnings.simplefilter("error", ScaleWarning)
        Steer(V, 3, 1e8)


def test_a_mistake_is_rejected_with_what_to_write():
    capture, example = Capture(3), re.escape("Steer(vector, layer=14)")
    function = re.escape("a function is called by Local(fn, layer=14)")
    refused_calls(
        (lambda: Plan.make(edits=V), "write for example " + example),
        (lambda: Plan.make(edits=lambda h: h), f"{function}.*{example}"),
        (lambda: to_async(hooks=[]), "capture=… to read them"),
        (lambda: SamplingParams(steer=E), re.escape("mean edits=Steer(vector, layer=…)?")),
        *(
            (lambda word=word: Capture(3, positions=word), '"last_prompt", which is −1.*"last_row"')
            for word in ("last", "last_token")
        ),
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
    words = SamplingParams
    refused_calls(
        (lambda: words(max_token=3), "did you mean max_tokens="),
        (lambda: words(max_new_tokens=3), "did you mean max_tokens="),
        (lambda: words(steering_vector={1: V}), "did you mean steering_vectors="),
        (lambda: words(captures=capture), "did you mean capture="),
        (lambda: LLM("m", layerz=[3]), "layerz: LLM.. has no such argument; did you mean layers="),
        (lambda: LLM("m", sites=["z"]), re.escape('mean midstream={"sites": …}')),
        (lambda: AsyncLLM(model="m", max_model_length=9), "did you mean max_model_len="),
        (lambda: to_async_with({"max_tokens": 3}), re.escape("SamplingParams(max_tokens=3), got")),
        (lambda: conversations("Hi"), re.escape('[{"role": "user", "content": "Hi"}]')),
        (lambda: conversations(["Hi"]), "got a text"),
        (lambda: np.asarray(rows()), re.escape('take one, as activations["resid_post", 3]')),
        (lambda: rows().save("rows.npz"), "ends in .safetensors, got 'rows.npz'.*numpy.savez"),
        (lambda: sweep().save("sweep.csv"), "ends in .json"),
    )
    for model in ("/nope", ".models/nope", "~/nope"):
        refused_calls((lambda model=model: LLM(model), f"no folder '{model}'"), error=ConfigError)
    of_one = r"one for each layer; take .best.vector or \[layer\].vector"
    refused_calls((lambda: directions().vector, of_one), error=AttributeError)
    refused_calls((loud, r"1.43e\+09.*norm=\"match\""), error=ScaleWarning)
    refused_calls((lambda: rows()["resid-post"], "mean `resid_post`"), error=KeyError)


def test_what_was_refused_without_a_reason_is_accepted(tmp_path: Path):
    steer = Steer(V, layer=[3, 4], site="mlp_out")
    assert (steer.layer, steer.site, Steer(V, 3).layer) == ([3, 4], "mlp_out", 3)
    assert (Steer(V, site="embed").layer, Steer("calm").site) == (None, None)
    assert directions().best.layer == 3
    (one,) = [{("resid_post", 3): torch.ones(4, 8)}]
    single = Activations(one, dict.fromkeys(one, torch.arange(4)), [5] * 4, 30)
    assert np.asarray(single, np.float64).sum() == 32
    registry = VectorRegistry(ModelShape(4, 8, frozenset(("resid_post", n) for n in range(4))))
    registry.register("calm", {2: V})
    assert list(registry) == ["calm"]
    assert registry["calm"]["resid_post", 2].size == 8
    write(tmp_path / "acts", [entry("a")])
    store = open_store(tmp_path / "acts")
    assert len(store.select(layers=[3], sites="resid_post")) == 3
    with pytest.raises(SpecError, match="argument of Store.select .did you mean `position`"):
        store.select(positions=0)
    with pytest.raises(StoreError, match="no store: it has no shards .*, but acts"):
        open_store(tmp_path)


INTERNAL = [
    "bind",
    "bound",
    "instructions",
    "is_bound",
    "left",
    "names",
    "own",
    "per_layer",
    "steps",
    "resolve",
]


@pytest.mark.parametrize(
    "part",
    [E, Capture(1), Probe(V, 1), Gate(E, V, 0.5), Lens()],
    ids=lambda part: type(part).__name__,
)
def test_what_is_completed_of_a_part_of_a_plan_is_what_a_caller_needs(part: Any):
    shown = [name for name in dir(part) if not name.startswith("_")]
    assert not set(shown) & set(INTERNAL)
    assert {"to_dict", "parse"} <= set(shown)
    for name in shown:
        getattr(part, name)


def test_a_layer_is_meant_by_its_digits():
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
def test_a_script_without_a_guard_ends_the_engines_process_with_one_line(monkeypatch):
    check_script()
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(SystemExit, match="put the script's body under `if __name__ ==") as caught:
        check_script()
    assert "\n" not in str(caught.value)
    monkeypatch.setitem(vars(envs), "VLLM_ENABLE_V1_MULTIPROCESSING", False)
    check_script()


@pytest.mark.usefixtures("spawns")
def test_a_script_from_standard_input_is_rejected_before_a_process_starts(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None, __file__="<stdin>"))
    with pytest.raises(UnsupportedError, match="from standard input; save it as a file"):
        check_script()
    monkeypatch.setitem(vars(envs), "VLLM_ENABLE_V1_MULTIPROCESSING", False)
    check_script()
