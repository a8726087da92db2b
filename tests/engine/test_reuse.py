"""Rows of a prefix that the cache serves come from the requests that computed it."""

from typing import Any

import pytest
import torch
from support import tiny
from support.cached_pair import fresh
from support.engines import greedy
from support.updating import Stepped

from midstream import Capture, Probe, Steer
from midstream.errors import SpecError
from midstream.plan import Switch

ALL = Capture("all", ["resid_pre", "resid_post"], reuse=True)


def ask(llm: Any, prompt: Any, count: int = 4, **asked: Any) -> Any:
    given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
    return llm.generate(given, greedy(count, detokenize=False), use_tqdm=False, **asked)[0]


def reused(output: Any) -> int:
    """How many rows of each tap were reused, which must be as many as the cache served."""
    counts = {one.reused for one in output.receipt.captured}
    assert len(counts) == 1
    return counts.pop()


def assert_same(warm: Any, cold: Any, reused_rows: int) -> None:
    """Reused rows must be those of the first request to the bit, and computed ones as they are with
    prefixes of any length in a batch of another size.
    """
    if hasattr(warm, "outputs"):
        warm, cold = warm.outputs[0], cold.outputs[0]
    assert list(warm.token_ids) == list(cold.token_ids)
    assert set(warm.activations) == set(cold.activations)
    for tap in cold.activations:
        assert torch.equal(warm.activations.positions_of(*tap), cold.activations.positions_of(*tap))
        mine, theirs = warm.activations[tap], cold.activations[tap]
        assert torch.equal(mine[:reused_rows], theirs[:reused_rows])
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_a_prompt_that_comes_again_has_its_rows_and_a_hit(llm: Any) -> None:
    prompt = fresh(100)
    cold = ask(llm, prompt, capture=ALL)
    assert (reused(cold), cold.num_cached_tokens) == (0, 0)
    warm = ask(llm, prompt, capture=ALL)
    assert (reused(warm), warm.num_cached_tokens) == (96, 96)
    assert_same(warm, cold, 96)
    assert warm.receipt.status == "ok"
    assert "of 2 " not in str(warm.receipt)
    assert "were reused" in str(warm.receipt)
    again = ask(llm, prompt, capture=Capture("all", ["resid_pre", "resid_post"]))
    assert (reused(again), again.num_cached_tokens) == (0, 0)


def test_a_turn_of_a_chat_reuses_the_rows_of_all_turns_before(llm: Any) -> None:
    prompt = fresh(50)
    for turn in range(3):
        out = ask(llm, prompt, 20, capture=ALL)
        assert out.num_cached_tokens == reused(out) == (0 if not turn else 64 if turn == 1 else 96)
        assert_same(out, ask(llm, prompt, 20, capture=Capture("all", ALL.sites.names)), 0)
        prompt = [*prompt, *out.outputs[0].token_ids, *fresh(15)]


def test_rows_of_other_edits_are_never_reused(llm: Any) -> None:
    prompt = fresh(100)
    vectors = [torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(n)) for n in (1, 2)]
    edits = [
        None,
        [Steer(vectors[0], 1, 4.0)],
        [Steer(vectors[1], 1, 4.0)],
        [Steer(vectors[0], 1, 4.0, positions=slice(70, None))],
    ]
    cold = [ask(llm, prompt, capture=ALL, edits=one) for one in edits]
    assert [reused(one) for one in cold] == [0, 0, 0, 64]
    for one, before in zip(edits, cold, strict=True):
        warm = ask(llm, prompt, capture=ALL, edits=one)
        assert (reused(warm), warm.num_cached_tokens) == (96, 96)
        assert_same(warm, before, 96)
        assert warm.receipt.edited is None or warm.receipt.edited.cached


def test_a_reset_of_the_prefix_cache_takes_the_rows_along(llm: Any) -> None:
    """Whoever resets it may have changed the weights."""
    prompt = fresh(100)
    ask(llm, prompt, capture=ALL)
    assert llm.reset_prefix_cache()
    ask(llm, prompt)  # its KV is cached anew, without rows
    for expected in (0, 96):
        out = ask(llm, prompt, capture=ALL)
        assert (out.num_cached_tokens, reused(out)) == (expected, expected)


def test_rows_are_not_reused_across_cache_salts(llm: Any) -> None:
    prompt = fresh(100)
    given = {"prompt_token_ids": prompt, "cache_salt": "mine"}
    ask(llm, given, capture=ALL)
    assert reused(ask(llm, prompt, capture=ALL)) == 0
    assert reused(ask(llm, given, capture=ALL)) == 96


def test_requests_that_are_preempted_have_each_row_once(llm: Any) -> None:
    prompts = {"a": fresh(100), "b": fresh(70)}
    cold = {name: ask(llm, prompt, 12, capture=ALL) for name, prompt in prompts.items()}
    run = Stepped(llm)
    for name, prompt in prompts.items():
        run.add(name, prompt, greedy(12, detokenize=False), capture=ALL)
    for steps in (2, 6):
        run.step(steps)
        assert llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
    for name, output in run.finish().items():
        assert output.outputs[0].receipt.status == "ok"
        assert_same(output, cold[name], 0)


def test_a_capture_that_cannot_reuse_rows_is_rejected(llm: Any, wide: Any, uncached: Any) -> None:
    prompt = fresh(10)
    with pytest.raises(SpecError, match=r"capture\.reuse.*reuse_bytes"):
        ask(wide, prompt, capture=ALL)
    with pytest.raises(SpecError, match=r"capture\[0\]\[1\]\.reuse.*reuse_bytes"):
        ask(uncached, prompt, capture=[[Capture(0), ALL]])


def test_the_edits_of_a_request_that_reuses_rows_cannot_change(llm: Any) -> None:
    edit, problem = Steer(torch.ones(64), 1), "keeps the edits it began with"
    guard = Probe(torch.ones(64), 2, name="guard", act=Switch(edits=[edit], above=0.0))
    with pytest.raises(SpecError, match=problem) as caught:
        ask(llm, fresh(40), capture=ALL, probes=guard)
    assert caught.value.path.endswith("act.switch")
    run = Stepped(llm)
    run.add("a", fresh(40), greedy(8), edits=[edit], capture=ALL)
    run.step(2)
    with pytest.raises(SpecError, match=problem):
        llm.update("a", scale=0)
    assert run.finish()["a"].outputs[0].receipt.status == "ok"
