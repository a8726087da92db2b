"""Random requests on SmolLM2 on a GPU, in float32: each result equals that of the request alone.

torch.compile, CUDA graphs and async scheduling are on, prompts come in chunks, prefixes are cached,
and there is so little KV cache that running requests are taken off. Which of vLLM's model runners
it is, `VLLM_USE_V2_MODEL_RUNNER` says, as for the other tests here.

`MIDSTREAM_ADVERSARY_REQUESTS=2000` asks for more of them, `MIDSTREAM_ADVERSARY_SEED=7` for others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adversary import Bench, Totals
from support.adversary_edits import catalogue
from support.adversary_judge import Measure
from support.adversary_mix import Mix, Shape
from support.adversary_run import assert_idle_and_clean
from support.engines import GPU_MEMORY, engine
from support.inner_oracle import INNER, InnerOracle
from support.oracle import relative_error
from support.oracle_edits import EVERY_SITE

SEED = int(os.environ.get("MIDSTREAM_ADVERSARY_SEED", "20261121"))
REQUESTS = int(os.environ.get("MIDSTREAM_ADVERSARY_REQUESTS", "400"))
ROUND = 200
CHUNK, LONGEST = 64, 240
BLOCKS = 32  # of 16 tokens, one of which is nobody's: two long requests
# The order of summation is the batch's, and attention rounds to TF32: of two runs of one request
# each is as right as the other. See test_operations.py for how far both are from transformers.
ALIKE = Measure(rows=4e-2, tie=0.2, splits=True, error=relative_error)
HOOKED = Measure(rows=4e-2, tie=0.2, splits=True, error=relative_error)
TEXT = (
    "The capital of France is Paris, where the river is wide and old. She said that two and two "
    "are four, but nobody in the room had asked. Water boils at a hundred degrees, and freezes at "
    "none; between the two there is a great deal of room for tea. In the morning we walked along "
    "the coast until the road ended, and then we walked on. A list of numbers: one, two, three, "
    "five, eight, thirteen, twenty-one. It is not known who first wrote this down, nor why."
)


@pytest.fixture(scope="module")
def families(smollm2: Path) -> tuple[tuple[int, ...], ...]:
    from transformers import AutoTokenizer

    ids = list(AutoTokenizer.from_pretrained(smollm2)(TEXT * 3).input_ids)
    return tuple(tuple(ids[start : start + 200]) for start in (0, 47))


@pytest.fixture(scope="module")
def bench(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    hooks = InnerOracle(smollm2, INNER["llama"], "cuda")
    common: dict[str, Any] = {
        "max_model_len": LONGEST,
        "max_num_seqs": 8,
        "skip_tokenizer_init": False,
        **GPU_MEMORY,
        "midstream": {"sites": [*EVERY_SITE, *hooks.sites]},
    }
    folder = os.environ.get("MIDSTREAM_ADVERSARY_FOLDER") or tmp_path_factory.mktemp("mixes")
    with (
        engine(
            smollm2,
            enforce_eager=False,
            enable_prefix_caching=True,
            block_size=16,
            num_gpu_blocks_override=BLOCKS,
            max_num_batched_tokens=CHUNK,
            async_scheduling=True,
            disable_log_stats=False,
            **common,
        ) as mixed,
        # Without graphs: with vLLM 0.33, graphs of two engines in one process disturb each other.
        engine(
            smollm2, enable_prefix_caching=False, max_num_batched_tokens=1024, **common
        ) as single,
    ):
        yield Bench(mixed, single, hooks, ALIKE, CHUNK, Path(folder), HOOKED)


def test_every_request_of_a_random_mix_gets_what_it_gets_alone(
    bench: Bench, families: tuple[tuple[int, ...], ...], capsys: pytest.CaptureFixture[str]
) -> None:
    replay = os.environ.get("MIDSTREAM_ADVERSARY_REPLAY")
    if replay:
        bench.replay(Path(replay))
        return
    wanted = "v1" if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else "v2"
    assert bench.mixed.info.workers[0].runner == wanted
    assert bench.mixed.llm_engine.vllm_config.scheduler_config.async_scheduling
    # No step gates: a score may fall on either side of a threshold.
    choices = catalogue(bench.hooks, families[0][:24], SEED, jumps=False)
    shape = Shape(families, LONGEST, CHUNK, stops=(" the", ",", " is", "\n"))
    totals = Totals()
    for nth in range(max(1, REQUESTS // ROUND)):
        bench.run(Mix(SEED + nth, min(ROUND, REQUESTS), shape, choices), totals)
    assert_idle_and_clean(bench.mixed)
    with capsys.disabled():
        sys.stdout.write(f"\n{wanted}, seed {SEED}, {torch.cuda.get_device_name()}\n{totals}\n")
    assert totals.preemptions > 0, totals
    assert totals.chunked > 0, totals
    assert totals.edited_hits > 0, totals
    assert totals.captured_hits > 0, totals
    assert totals.cached_edits > 0, totals
    assert totals.inner_rows > 0, totals
    assert totals.of_heads > 0, totals
    # Where tokens are as likely; many would mean that something else makes them part.
    assert totals.parted <= max(2, totals.completions // 20), totals
