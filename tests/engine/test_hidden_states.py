"""Engines from which vLLM's own connector reads hidden states, next to captured rows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import host_connector
from support.cached_pair import fresh
from support.engines import engine, greedy
from support.oracle import Oracle
from support.tiny import HIDDEN, LAYERS

from midstream import Capture, Steer
from midstream.errors import UnsupportedError

UP = torch.linspace(-2, 2, HIDDEN)
EDITS = {"plain": (), "at layer 1": (Steer(UP, layer=1),), "last": (Steer(UP, layer=LAYERS - 1),)}


@pytest.fixture(scope="module")
def extracting(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine that extracts the output of every layer; prompts come in chunks of 64."""
    folder = str(tmp_path_factory.mktemp("hidden_states"))
    more = host_connector.settings(folder, list(range(1, LAYERS + 1)))
    size = {"max_num_batched_tokens": 64, "block_size": 32, "enable_prefix_caching": True}
    with engine(tiny_llama, **size, **more) as llm:
        yield llm


def test_captured_rows_are_vllms_hidden_states_to_the_bit_under_edits_and_from_the_cache(
    extracting: Any,
) -> None:
    prompt, everything = fresh(90), Capture("all", positions="prompt")
    for name, edits in EDITS.items():
        asked = {"prompts": {"prompt_token_ids": prompt}, "use_tqdm": False, "edits": list(edits)}
        params = greedy(2, detokenize=False)
        (first,) = extracting.generate(**asked, sampling_params=params, capture=everything)
        theirs = host_connector.hidden_states(extracting, first)
        (again,) = extracting.generate(**asked, sampling_params=params)
        assert again.num_cached_tokens == 64
        cached = host_connector.hidden_states(extracting, again)
        for layer in range(LAYERS):
            rows = first.activations["resid_post", layer]
            assert torch.equal(rows, theirs[:, layer]), (name, layer)
            assert torch.equal(rows, cached[:, layer]), (name, layer)


def test_they_are_transformers_rows(extracting: Any, tiny_llama: Path) -> None:
    oracle = Oracle(tiny_llama, "model.layers", "post_attention_layernorm")
    prompt = fresh(40)
    wanted = oracle.run(prompt).values
    (output,) = extracting.generate(
        {"prompt_token_ids": prompt}, greedy(1, detokenize=False), use_tqdm=False
    )
    theirs = host_connector.hidden_states(extracting, output)
    for layer in range(LAYERS):
        rows = wanted["resid_post", layer]
        torch.testing.assert_close(theirs[:, layer], rows, rtol=1e-4, atol=1e-4)


def test_a_connector_that_brings_kv_is_refused_before_weights_are_read(tiny_llama: Path) -> None:
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    with (
        pytest.raises(UnsupportedError, match=r"only read hidden states.*; got ExampleConnector"),
        engine(tiny_llama, kv_transfer_config=transfer),
    ):
        pass
