"""Tests of updates, switches and controllers in an engine that drafts, for
`system/test_updates_drafts.py`. They run in a process of their own: vLLM's drafter imports numba,
with which no second engine starts on a CPU.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import controlling
from support.engines import engine, greedy
from support.oracle import Oracle
from support.updating import (
    Stepped,
    check_replay,
    check_versions,
    everything,
    steer,
    vector,
)

from midstream import Controller, Probe, Threshold


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> Oracle:
    return Oracle(tiny_llama, "model.layers", "post_attention_layernorm")


@pytest.fixture(scope="module")
def drafting(tiny_llama: Path) -> Iterator[Any]:
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with engine(
        tiny_llama,
        disable_log_stats=False,
        speculative_config={**drafts, "prompt_lookup_min": 1},
        midstream={"controllers": controlling.DECLARED},
    ) as found:
        yield found


def test_with_drafts_a_position_has_the_version_that_held_when_it_was_scheduled(drafting, oracle):
    """Rejected drafts are computed again, under the version that their positions had."""
    prompt = [5, 17, 33, 5, 17, 33, 5, 17]
    (first, hook), (second, later) = steer(vector(1), 1, 2.0), steer(vector(2), 0, 3.0)
    llm = drafting
    run = Stepped(llm)
    for nth in range(4):
        run.add(f"r{nth}", prompt[nth:], greedy(60), edits=[first], capture=everything())
    for step in range(12):
        run.step()
        for nth in range(4):
            if step % 4 == nth:
                llm.update(f"r{nth}", edits=[[second], [first]][step // 4 % 2])
    outputs = run.finish()
    for nth in range(4):
        found = outputs[f"r{nth}"].outputs[0]
        assert len(found.receipt.versions) == 4
        hooks = {0: [hook], 1: [later], 2: [hook], 3: [later]}
        check_replay(oracle, prompt[nth:], found, hooks)
    counts = {one.name: getattr(one, "value", 0) for one in llm.get_metrics()}
    drafted = counts["vllm:spec_decode_num_draft_tokens"]
    assert drafted > counts["vllm:spec_decode_num_accepted_tokens"] > 0


def test_with_drafts_controllers_change_what_is_not_scheduled_and_stop_at_an_accepted_token(
    drafting: Any, oracle: Oracle
) -> None:
    prompt = [5, 17, 33, 5, 17, 33, 5, 17]
    first, hook = steer(vector(1), 1, 2.0)
    asked = {"edits": [first], "capture": everything(), "probes": Probe(vector(3), 1, name="p")}
    run = Stepped(drafting)
    run.add("free", prompt, greedy(40), **asked)
    scores = run.finish()["free"].probes["p"][len(prompt) :]
    limits = {f"threshold {share}": float(scores.quantile(share)) for share in (0.2, 0.5, 0.8)}
    drafting.reset_prefix_cache()
    before = {one.name: getattr(one, "value", 0) for one in drafting.get_metrics()}
    run = Stepped(drafting)
    controllers = {
        **{name: Threshold("p", above=at, on=0.5, off=1.5) for name, at in limits.items()},
        "halving": Controller("halving"),
        "limit": Controller("limit"),
        "none": None,
    }
    for name, controller in controllers.items():
        run.add(name, prompt, greedy(40), controller=controller, **asked)
    outputs = {name: one.outputs[0] for name, one in run.finish().items()}
    for one in outputs.values():
        check_versions(oracle, prompt, one, {"": [hook]})
    changes = 0
    for name, at in limits.items():
        scores = outputs[name].probes["p"]
        for one in outputs[name].receipt.versions[1:]:
            # What it was given last is of one of the positions before, at most three drafts away.
            start, _ = one.positions
            assert (one.scale == 0.5) in (scores[start - 4 : start] > at).tolist()
            changes += 1
    assert changes > 3
    assert len(outputs["halving"].receipt.versions) > 5
    ended = outputs["limit"]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", "controller:limit")
    assert 9 <= len(ended.token_ids) < 9 + 3
    assert len(ended.probes["p"]) == len(prompt) + len(ended.token_ids)
    after = {one.name: getattr(one, "value", 0) for one in drafting.get_metrics()}
    for kind in ("accepted", "draft"):
        name = f"vllm:spec_decode_num_{kind}_tokens"
        assert after[name] > before[name]
