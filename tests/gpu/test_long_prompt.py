"""A prompt of 1,000,000 tokens: scores of probes equal those that float64 computes offline from the
captured rows of all its tokens, whatever the chunks that it came in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.engines import engine, greedy, tokens

from midstream import Capture, Probe
from midstream.plan import AttentionPool

LENGTH = int(os.environ.get("MIDSTREAM_LONG_PROMPT", "1000000"))
LAYER, WIDTH, HEADS = 1, 128, 2
SECONDS = 400  # of both requests: about a minute is expected
pytestmark = pytest.mark.timeout(SECONDS + 120)
DRAW = np.random.default_rng(11)
ROWS = DRAW.standard_normal((5, WIDTH)).astype(np.float32) / np.float32(WIDTH**0.5)
QUERIES, VALUES, DIRECTION = ROWS[:HEADS], ROWS[HEADS : 2 * HEADS], ROWS[4]


def probes(**where: Any) -> list[Probe]:
    heads = AttentionPool(query=QUERIES, value=VALUES)
    return [
        Probe(DIRECTION, LAYER, name="linear", **where),
        Probe(DIRECTION, LAYER, name="largest", pool="max", **where),
        Probe(DIRECTION, LAYER, name="average", pool="ema:0.999", **where),
        Probe(attention_pool=heads, layer=LAYER, name="attention", **where),
        Probe(
            attention_pool=AttentionPool(value=VALUES, kind="max"),
            layer=LAYER,
            name="multimax",
            **where,
        ),
    ]


@pytest.fixture(scope="module")
def long_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A compiled model of two layers whose context holds the prompt."""
    folder = tmp_path_factory.mktemp("long")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=WIDTH,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=LENGTH + 64,
        rope_theta=1e7,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    with engine(
        Path(folder),
        enforce_eager=False,
        max_model_len=LENGTH + 32,
        max_num_batched_tokens=min(LENGTH, 16384),
        max_num_seqs=2,
        enable_prefix_caching=True,
        midstream={"sites": ["resid_post"], "arena_bytes": 4 << 30, "probes": 16},
    ) as llm:
        yield llm


def test_scores_of_a_million_tokens_equal_those_computed_offline(long_llm: Any) -> None:
    ids = DRAW.integers(3, 500, LENGTH).tolist()
    asked: dict[str, Any] = {"use_tqdm": False, "probes": [probes()]}
    (whole,) = long_llm.generate(
        [tokens(ids)], greedy(2), capture=Capture(layers=[LAYER], sites=["resid_post"]), **asked
    )
    rows = whole.activations["resid_post", LAYER].double().numpy()
    assert len(rows) == LENGTH + 1
    (again,) = long_llm.generate([tokens(ids)], greedy(2), **asked)
    assert again.num_cached_tokens > 0.99 * LENGTH
    for name, scores in expected(rows).items():
        for output in (whole, again):
            served = output.probes[name].double().numpy()
            np.testing.assert_allclose(served, scores, rtol=1e-5, atol=1e-5, err_msg=name)
            assert output.probes.positions_of(name).tolist() == list(range(len(rows)))
    assert not whole.receipt.problems
    assert not again.receipt.problems


def expected(rows: Any) -> dict[str, Any]:
    """The scores of each probe, by its definition in float64, of rows [n, width]."""
    linear = rows @ DIRECTION
    # No logit is large, so a sum of exponentials loses nothing.
    weights, values = np.exp(rows @ QUERIES.T), rows @ VALUES.T
    average = np.empty_like(linear)
    average[0] = linear[0]
    for place in range(1, len(linear)):
        average[place] = 0.999 * average[place - 1] + 0.001 * linear[place]
    return {
        "linear": linear,
        "largest": np.maximum.accumulate(linear),
        "average": average,
        "attention": ((weights * values).cumsum(0) / weights.cumsum(0)).sum(1),
        "multimax": np.maximum.accumulate(values).sum(1),
    }
