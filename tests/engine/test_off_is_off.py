"""An engine with midstream enabled, of which nothing is asked, is plain vLLM to the bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.asking import ask_all
from support import tiny
from support.adversary_edits import catalogue
from support.adversary_mix import Mix, Shape
from support.adversary_run import Driver, assert_idle_and_clean, rewinding
from support.engines import engine, greedy
from support.nightly import rounds
from support.oracle_edits import EVERY_SITE

from midstream import Capture, Probe, Scale, Steer

CHUNK, LONGEST, REQUESTS = 48, 192, rounds(suite=36, nightly=60)
SETTINGS = {
    "max_num_batched_tokens": CHUNK,
    "max_model_len": LONGEST,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
    "block_size": 32,
    "num_gpu_blocks_override": 20,
}
Logprobs = list[list[tuple[int, float, int | None]]]


@pytest.fixture(scope="module")
def rewound() -> Iterator[None]:
    with rewinding():
        yield


@pytest.fixture(scope="module")
def plain(tiny_llama: Path, rewound: None) -> Iterator[Any]:
    with engine(tiny_llama, plain=True, **SETTINGS) as found:
        yield found


@pytest.fixture(scope="module")
def llm(tiny_llama: Path, rewound: None) -> Iterator[Any]:
    with engine(
        tiny_llama,
        midstream={"sites": list(EVERY_SITE)},
        **{**SETTINGS, "disable_log_stats": False},
    ) as found:
        yield found


def prompts(seed: int) -> list[list[int]]:
    """Of one token to several chunks, some with a common beginning."""
    draw = torch.Generator().manual_seed(seed)
    first = torch.randint(3, tiny.VOCAB, (130,), generator=draw).tolist()
    sizes = (1, 2, 31, 32, 33, 64, 65, 100, 127, 130)
    found = [first[:size] for size in sizes]
    return found + [torch.randint(3, tiny.VOCAB, (s,), generator=draw).tolist() for s in sizes]


def told(logprobs: Any) -> Logprobs:
    return [
        [(token, one.logprob, one.rank) for token, one in (step or {}).items()]
        for step in logprobs or ()
    ]


def results(llm: Any, seed: int) -> list[Any]:
    """All that a batch of requests gives, twice: the second time with a prefix cache that is warm.

    The same requests at the same time make the same batches, and so the same sums.
    """
    from vllm import SamplingParams

    given = prompts(seed)
    params = [
        greedy(12, logprobs=5, detokenize=False)
        if nth % 3
        else SamplingParams(
            n=2, seed=nth, max_tokens=9, logprobs=3, detokenize=False, ignore_eos=True
        )
        for nth in range(len(given))
    ]
    params[4] = greedy(3, logprobs=2, prompt_logprobs=3, detokenize=False)
    assert llm.reset_prefix_cache()
    found = []
    for _ in range(2):
        for output in ask_all(llm, given, params):
            found.append((output.num_cached_tokens, told(output.prompt_logprobs)))
            found += [(list(one.token_ids), told(one.logprobs)) for one in output.outputs]
    return found


def test_with_nothing_asked_it_is_plain_vllm_to_the_bit(llm, plain):
    expected = results(plain, 1)
    assert any(hit for hit, *_ in expected[::2] if isinstance(hit, int))
    assert results(llm, 1) == expected


def test_after_any_mix_it_is_plain_vllm_to_the_bit(llm, plain, oracle):
    draw = torch.Generator().manual_seed(4)
    families = tuple(
        tuple(torch.randint(3, tiny.VOCAB, (140,), generator=draw).tolist()) for _ in range(3)
    )
    choices = catalogue(oracle, families[0][:24], 4)
    mix = Mix(4, REQUESTS, Shape(families, LONGEST, CHUNK), choices)
    ran = Driver(llm).run(mix.coming, REQUESTS)
    assert sum(bool(ask.parts) for ask in ran.asks) > REQUESTS // 2
    assert_idle_and_clean(llm)
    assert results(llm, 2) == results(plain, 2)


def test_beside_requests_that_are_read_and_edited_plain_ones_are_as_without_them(
    llm: Any, plain: Any
) -> None:
    # Without common beginnings: an edited request shares less of them, and batches would differ.
    given = [one for one in prompts(3)[10:] if len(one) > 1][:8]
    params = greedy(12, logprobs=5, detokenize=False)
    wide = torch.full((tiny.HIDDEN,), 2.0)
    asked = {
        "edits": [Scale(1.2, layer=1) if nth % 2 else None for nth in range(8)],
        "steer": [Steer(wide, layer=0, phase="generated") if nth % 4 == 1 else None
                  for nth in range(8)],
        "probes": [Probe(wide, 2, positions="generated") if nth % 2 else None for nth in range(8)],
        "capture": [Capture("all", positions="generated") if nth % 2 else None
                    for nth in range(8)],
    }  # fmt: skip
    for engine_ in (llm, plain):
        assert engine_.reset_prefix_cache()
    both = [
        ask_all(engine_, given, params, **more) for engine_, more in ((llm, asked), (plain, {}))
    ]
    for nth, (mine, theirs) in enumerate(zip(*both, strict=True)):
        same = told(mine.outputs[0].logprobs) == told(theirs.outputs[0].logprobs)
        assert same == (nth % 2 == 0)


def test_when_everything_is_cleared_it_is_plain_vllm_to_the_bit(llm, plain):
    llm.vectors.register("left", [1.0] * tiny.HIDDEN)
    llm.steering.set(base={"resid_post": {1: [0.5] * tiny.HIDDEN}}, generated=Scale(1.5, layer=0))
    expected = results(plain, 5)
    try:
        assert results(llm, 5) != expected
    finally:
        llm.steering.clear()
        llm.vectors.remove("left")
    assert results(llm, 5) == expected
