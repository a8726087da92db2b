"""The simplest calls of an engine with default settings: `run_with_cache` and a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny
from support.end_oracle import EndOracle
from support.engines import engine
from support.inner_served import TOLERANCE
from support.oracle_edits import At
from support.refusals import refused_calls

from midstream import KL, Activations, Capture, Steer

PROMPT, OTHER = [5, 17, 33, 101, 8, 77], [5, 17, 90, 101, 8, 77]


# gemma2 caps its logits and adds one to the weights of its norm.
@pytest.fixture(scope="module", params=["llama", "gemma2"])
def served(request: pytest.FixtureRequest, tiny_models: Path) -> Iterator[tuple[Any, EndOracle]]:
    path = tiny.make(f"{request.param}-cached", tiny_models, tiny.MODELS[request.param])
    with engine(path, midstream={}) as llm:
        yield llm, EndOracle(path, request.param)


def test_run_with_cache_returns_logits_and_activations_as_transformer_lens_does(
    served: tuple[Any, EndOracle],
) -> None:
    llm, oracle = served
    v = torch.linspace(-1, 1, oracle.width)
    for edits, at in ((None, []), ((v, 1), [At(Steer(v, 1))])):
        logits, cache = llm.run_with_cache(PROMPT, edits=edits)
        seen = oracle.run(PROMPT, at)
        assert logits.shape == (1, len(PROMPT), seen.logits.shape[1])
        assert (logits[0] - seen.logits).abs().max() < TOLERANCE
        layers = range(oracle.num_layers)
        assert list(cache) == [f"blocks.{layer}.hook_resid_post" for layer in layers]
        for layer in layers:
            rows = cache[f"blocks.{layer}.hook_resid_post"]
            assert (rows - seen.values["resid_post", layer][None]).abs().max() < TOLERANCE
            assert rows.shape[0] == 1
            assert torch.equal(cache["resid_post", layer], rows)
            assert torch.equal(cache.stack_activation("resid_post")[layer], rows)
        assert isinstance(cache.remove_batch_dim(), Activations)
    name = "blocks.1.hook_resid_post"
    for names in (name, [name], lambda hook: hook.startswith("blocks.1."), "resid_post.1"):
        nothing, few = llm.run_with_cache(PROMPT, names, return_type=None)
        assert (nothing, list(few)) == (None, [name])
        assert name in few
    refused_calls(
        (lambda: llm.run_with_cache([PROMPT, OTHER]), "prompt", "expected one, got 2"),
        (lambda: llm.run_with_cache(PROMPT, lambda _: False), "names_filter", "chooses none"),
        (lambda: llm.run_with_cache(PROMPT, 3), "names_filter", "expected a name, a list"),
        (lambda: llm.run_with_cache(PROMPT, "nonsense"), "names_filter", "unknown site"),
        (lambda: llm.run_with_cache(PROMPT, return_type="loss"), "return_type", "expected"),
        (lambda: llm.run_with_cache(PROMPT, "blocks.1.attn.hook_z"), "names_filter", "z at"),
    )
    refused_calls((lambda: cache["resid_post"], "names no layer"), error=KeyError)


def test_the_simplest_sweep_runs_on_the_simplest_engine(served: tuple[Any, EndOracle]) -> None:
    llm, oracle = served
    found = llm.sweep(PROMPT, OTHER, KL(), use_tqdm=False)
    assert found.coords["site"] == ["resid_post"]
    clean = torch.log_softmax(oracle.run(OTHER).logits[-1].double(), -1)
    own = torch.log_softmax(oracle.run(PROMPT).logits[-1].double(), -1)
    assert found.corrupt == pytest.approx(float((clean.exp() * (clean - own)).sum()), abs=1e-4)
    assert np.abs(found.values[:, -1, -1]).max() < 1e-4  # the source's own last vector
    assert np.abs(found.values[:, :, :2] - found.corrupt).max() < 1e-4  # where nothing differs
    assert f"{found.values[0, 1, 3]:.2f}" in str(found)
    assert str(found).startswith(repr(found))


def test_reprs_of_an_engine_are_short_and_say_what_is_tapped(
    served: tuple[Any, EndOracle],
) -> None:
    llm, oracle = served
    for told in (repr(llm.info), str(llm.info), repr(llm.sites())):
        assert len(told) < 2000
        assert "resid_post" in told
    assert f"{oracle.num_layers} layers, {oracle.width} wide" in repr(llm.info)
    (output,) = llm.generate([PROMPT], capture=Capture(1, max_rows=2), use_tqdm=False)
    assert "activations: Activations(resid_post; layers 1; 2 rows" in str(output)
    assert "receipt: ok" in str(output)
