"""Random requests on one engine: each result equals that of the same request alone.

The engine of the mix has prefix caching on, prompts in chunks, and so little KV cache that running
requests are taken off and computed anew. The other has none of this and serves one request at a
time. One in ten is held against transformers with hooks as well.

    MIDSTREAM_ADVERSARY_SEED=7 pytest tests/engine/test_adversarial.py     another mix
    MIDSTREAM_ADVERSARY_REPLAY=….json pytest …                             one that was written
    scripts/nightly.sh                                                     many more, compiled too
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.adversary import Bench, Totals
from support.adversary_edits import Catalogue, catalogue
from support.adversary_judge import Measure
from support.adversary_mix import Mix, Shape
from support.adversary_run import assert_idle_and_clean, rewinding
from support.engines import engine
from support.inner_cases import HEADS
from support.inner_oracle import INNER, InnerOracle
from support.nightly import NIGHTLY
from support.oracle_edits import EVERY_SITE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SEED = int(os.environ.get("MIDSTREAM_ADVERSARY_SEED", "20261121"))
SUITE, THOUSANDS, ROUND = 80, 2000, 200
CHUNK = 48
LONGEST = 192
BLOCKS = 14  # of 32 tokens, one of which is nobody's: two long requests and a bit


@pytest.fixture(scope="module")
def wordy_llama(tiny_models: Path) -> Path:
    """A tiny Llama of four heads, two of keys, with a tokenizer of a word per token, so that texts
    can stop a generation.
    """
    target = tiny_models / "wordy-llama"
    if not target.exists():
        shutil.copytree(tiny.make("llama-inner", tiny_models, HEADS), target)
        core = Tokenizer(models.WordLevel({f"w{n}": n for n in range(tiny.VOCAB)}, unk_token="w0"))
        core.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(target)
    return target


@pytest.fixture(scope="module")
def hooks(wordy_llama: Path) -> InnerOracle:
    return InnerOracle(wordy_llama, INNER["llama"])


def families(seed: int) -> tuple[tuple[int, ...], ...]:
    draw = torch.Generator().manual_seed(seed)
    return tuple(
        tuple(torch.randint(3, tiny.VOCAB, (140,), generator=draw).tolist()) for _ in range(2)
    )


@contextmanager
def bench(model: Path, hooks: InnerOracle, folder: Path, **mixed: Any) -> Iterator[Bench]:
    sites = [*EVERY_SITE, *hooks.sites]
    midstream = {"sites": sites, "gate_states": 6}
    common = {"midstream": midstream, "max_model_len": LONGEST, "max_num_seqs": 8}
    with (
        rewinding(),
        engine(
            model,
            enable_prefix_caching=True,
            block_size=32,
            num_gpu_blocks_override=BLOCKS,
            max_num_batched_tokens=CHUNK,
            disable_log_stats=False,
            **{**common, **mixed},
        ) as small,
        engine(model, enable_prefix_caching=False, max_num_batched_tokens=1024, **common) as single,
    ):
        yield Bench(small, single, hooks, Measure(), CHUNK, folder)


@pytest.fixture(scope="module")
def eager(
    wordy_llama: Path, hooks: InnerOracle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    with bench(wordy_llama, hooks, tmp_path_factory.mktemp("mixes")) as found:
        yield found


@pytest.fixture(scope="module")
def choices(hooks: InnerOracle) -> Catalogue:
    return catalogue(hooks, families(SEED)[0][:24], SEED, memory=True)


def mix(seed: int, count: int, choices: Catalogue) -> Mix:
    shape = Shape(families(SEED), LONGEST, CHUNK, stops=("w12", "w7", "3 w", "5"))
    return Mix(seed, count, shape, choices)


def assert_it_showed_something(totals: Totals, asked: int) -> None:
    assert totals.requests == asked
    shown = {
        "preemptions": 100,
        "chunked": 5,
        "hits": 6,
        "edited_hits": 15,
        "inner_edits": 4,
        "inner_rows": 4,
        "of_heads": 6,
        "of_dims": 100,
        "captured_hits": 25,
        "scored_hits": 40,
        "cached_edits": 1,
        "given_up": 40,
        "stopped": 20,
        "held_against_hooks": 15,
    }
    for name, share in shown.items():
        assert getattr(totals, name) > asked / share, f"{name}: the mix shows little\n{totals}"


def test_every_request_of_a_random_mix_gets_what_it_gets_alone(eager, choices):
    replay = os.environ.get("MIDSTREAM_ADVERSARY_REPLAY")
    if replay:
        eager.replay(Path(replay))
        return
    totals = Totals()
    eager.run(mix(SEED, SUITE, choices), totals)
    assert_it_showed_something(totals, SUITE)
    assert_idle_and_clean(eager.mixed)


@pytest.mark.nightly
@pytest.mark.skipif(not NIGHTLY, reason="MIDSTREAM_NIGHTLY is not set")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_so_it_is_for_thousands(wordy_llama, hooks, choices, tmp_path, compiled, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    totals = Totals()
    folder = Path(os.environ.get("MIDSTREAM_ADVERSARY_FOLDER", tmp_path / "mixes"))
    with bench(wordy_llama, hooks, folder, enforce_eager=not compiled) as found:
        for nth in range(THOUSANDS // ROUND):
            found.run(mix(SEED + 1 + nth, ROUND, choices), totals)
    assert_it_showed_something(totals, THOUSANDS)
