"""Tests of what is kept with cached blocks in an engine that drafts, for
`system/test_kept_drafts.py`. They run in a process of their own: vLLM's drafter imports numba, with
which no second engine starts on a CPU; the one without drafts starts first.

Each answer is held against the same request on an engine without drafts and without a prefix cache.
Of the drafts some are right and some wrong, and the workers learn of it a step later. A block is 32
tokens.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adversary_run import assert_idle_and_clean
from support.cached_pair import Pair, fresh, vector
from support.engines import engine, generated, greedy
from support.scripted import Script, optimistic
from support.speculation import counted
from support.updating import Stepped

from midstream import Capture, Gate, Probe, Steer
from midstream.plan import AttentionPool

COMMON: dict[str, Any] = {
    "block_size": 32,
    "midstream": {"sites": ["resid_pre", "resid_post"], "gate_states": 12},
}
DRAFTING: dict[str, Any] = {
    "enable_prefix_caching": True,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 6,
    "disable_log_stats": False,
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
    },
}


def gate(seed: int = 3, **memory: Any) -> Gate:
    return Gate(Steer(vector(2, 0.3), layer=2), Probe(vector(seed), 1), **memory)


HEADS = torch.stack([vector(seed, 0.1) for seed in (6, 7)])
ASKED: dict[str, dict[str, Any]] = {
    "hold": {"edits": gate(threshold=20.0, hold=3)},
    "release": {"edits": gate(threshold=10.0, smooth=0.1, release=-1.0, hold=2)},
    "gates": {
        "edits": [
            [gate(threshold=30.0, hold="rest"), gate(4, threshold=0.0, smooth=0.2, sharpness=0.1)]
        ]
    },
    "probes": {
        "probes": [
            [
                Probe(vector(5), 1, name="mean", pool="mean:8"),
                Probe(
                    attention_pool=AttentionPool(query=HEADS, value=HEADS, window=10),
                    layer=2,
                    name="heads",
                    positions=slice(5, None),
                ),
            ]
        ]
    },
    "all": {
        "edits": gate(threshold=0.0, smooth=0.02, sharpness=0.5),
        "probes": Probe(vector(6), 2, name="after"),
        "capture": Capture(1, reduce="moments", positions=slice(3, None), phase="prompt"),
    },
}


@pytest.fixture(scope="module")
def pair(tiny_llama: Path) -> Iterator[Pair]:
    with (
        engine(tiny_llama, **COMMON, enable_prefix_caching=False) as plain,
        engine(tiny_llama, **COMMON, **DRAFTING) as drafting,
    ):
        yield Pair(drafting, plain)


@pytest.fixture
def truth(pair: Pair) -> Iterator[list[dict[str, list[int]]]]:
    """Prompts and answers of requests, from which drafts are made: the tests add to them."""
    told: list[dict[str, list[int]]] = []
    script = Script(pair.cached, told, None)
    before = counted()
    with script, optimistic(True) as steps:
        script._sequences = _Sequences(told)  # type: ignore[assignment]
        yield told
    accepted, rejected = counted(before)
    assert min(accepted, rejected) > 20
    assert steps[0] > 20
    assert_idle_and_clean(pair.cached)
    assert pair.cached.reset_prefix_cache()


class _Sequences(list[list[int]]):
    """The sequences of what is known by now."""

    def __init__(self, told: list[dict[str, list[int]]]) -> None:
        super().__init__()
        self._told = told

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[*one["prompt"], *one["generated"]] for one in self._told])


def ask(pair: Pair, truth: list[Any], prompt: list[int], hit: int | None, **more: Any) -> list[int]:
    """A prompt with its answer."""
    count = more.get("count", 5)
    asked = {name: value for name, value in more.items() if name != "count"}
    alone = pair.plain.generate(
        {"prompt_token_ids": prompt}, greedy(count, detokenize=False), use_tqdm=False, **asked
    )[0]
    truth.append({"prompt": prompt, "generated": generated(alone)})
    output = pair.ask(prompt, hit, **more)
    assert output.receipt.status == "ok"
    return [*prompt, *generated(output)]


@pytest.mark.parametrize("name", ASKED)
def test_a_turn_goes_on_from_what_is_kept_of_tokens_that_were_drafted(
    pair: Pair, truth: list[Any], name: str
) -> None:
    asked, late = ASKED[name], {"capture": Capture(2, positions=slice(128, None))}
    # A reduction of a prompt that ends later is kept up to the end of the one before.
    hits = (0, 96, 128, 64)
    if "capture" in asked:
        hits, late = (0, 32, 96, 64), {}
    start = fresh(40)
    first = ask(pair, truth, start, hits[0], count=60, **asked)
    second = ask(pair, truth, [*first, 7, 8, 9], hits[1], count=40, **asked)
    ask(pair, truth, [*second, 5], hits[2], count=20, **asked, **late)
    # Another turn after the first drafted tokens.
    ask(pair, truth, [*first[:70], *fresh(40)], hits[3], count=20, **asked)


def test_preempted_requests_go_on_from_what_is_kept(pair: Pair, truth: list[Any]) -> None:
    prompts = {name: fresh(50) for name in ASKED}
    expected = {}
    for name, prompt in prompts.items():
        given = {"prompt_token_ids": prompt}
        (expected[name],) = pair.plain.generate(
            given, greedy(40, detokenize=False), use_tqdm=False, **ASKED[name]
        )
        truth.append({"prompt": prompt, "generated": generated(expected[name])})
    stepped = Stepped(pair.cached)
    for name, prompt in prompts.items():
        asked = {
            key: value[0] if isinstance(value, list) else value
            for key, value in ASKED[name].items()
        }
        stepped.add(name, prompt, greedy(40, detokenize=False), **asked)
    for stop in (12, 5, 9):
        stepped.step(stop)
        stepped.preempt()
    for name, output in stepped.finish().items():
        assert output.receipt.status == "ok"
        assert generated(output) == generated(expected[name])
        for probe in getattr(output, "probes", None) or ():
            torch.testing.assert_close(
                output.probes[probe], expected[name].probes[probe], rtol=1e-3, atol=1e-3
            )
