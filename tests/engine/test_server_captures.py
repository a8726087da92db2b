"""Captures of every request, set and cleared while requests run."""

from typing import Any

import pytest
import torch
from support import tiny
from support.engines import finish, greedy, tokens

from midstream import Capture, Steer

SIZE, COUNT = 100, 4
WHOLE = 96  # tokens of the prompt's whole blocks
WATCHED = Capture([1, 2], positions=["prompt", "generated"])
_made = iter(range(5000, 9999))


@pytest.fixture
def prompt() -> list[int]:
    """A prompt that no other test has seen."""
    draw = torch.Generator().manual_seed(next(_made))
    return torch.randint(3, tiny.VOCAB, (SIZE,), generator=draw).tolist()


def ask(llm: Any, prompt: list[int], **asked: Any) -> Any:
    params = greedy(COUNT, detokenize=False)
    return llm.generate(tokens(prompt), params, use_tqdm=False, **asked)[0]


def by_hand(llm: Any, name: str, prompt: list[int]) -> None:
    llm.llm_engine.add_request(name, tokens(prompt), greedy(COUNT, detokenize=False))


def assert_same(found: Any, expected: Any) -> None:
    assert set(found) == set(expected)
    for tap, rows in expected.items():
        assert found.positions_of(*tap).equal(expected.positions_of(*tap))
        torch.testing.assert_close(found[tap], rows, rtol=1e-4, atol=1e-4)


def test_requests_have_the_captures_that_were_set_when_they_came(llm, uncached, prompt):
    expected = ask(uncached, prompt, capture=WATCHED).activations
    by_hand(llm, "before", prompt)
    llm.llm_engine.step()
    llm.captures.set("watch", WATCHED, "memory")
    by_hand(llm, "during", prompt)
    llm.llm_engine.step()
    llm.captures.set("watch", Capture(0, positions="last_prompt"), "memory")
    by_hand(llm, "replaced", prompt)
    llm.llm_engine.step()
    llm.captures.clear("watch")
    by_hand(llm, "after", prompt)
    found = finish(llm)
    for name in ("before", "after"):
        assert found[name].activations is None
        assert found[name].receipt is None
    assert_same(found["during"].activations, expected)
    assert found["during"].receipt.status == "ok"
    assert found["replaced"].activations.counts() == {("resid_post", 0): 1}


def test_prefix_cache_hits_are_capped_while_a_capture_is_set(wide, uncached, prompt):
    expected = ask(uncached, prompt, capture=WATCHED).activations
    assert [ask(wide, prompt).num_cached_tokens for _ in range(2)] == [0, WHOLE]
    wide.captures.set("watch", WATCHED, "memory")
    found = ask(wide, prompt)
    assert found.num_cached_tokens == 0
    assert_same(found.activations, expected)
    wide.captures.set("watch", Capture(1, positions="generated"), "memory")
    assert ask(wide, prompt).num_cached_tokens == WHOLE
    wide.captures.clear()
    assert ask(wide, prompt).num_cached_tokens == WHOLE


def test_kept_rows_are_collected_whatever_a_request_captures_itself(llm, uncached, prompt):
    edits = Steer([1.0] * tiny.HIDDEN, 1)
    expected = ask(uncached, prompt, capture=WATCHED, edits=edits).activations
    llm.captures.set("watch", WATCHED)
    first = ask(llm, prompt, edits=edits)
    assert not hasattr(first, "activations")
    second = ask(llm, prompt, edits=edits, capture=Capture(0, positions="last_prompt"))
    assert second.activations.counts() == {("resid_post", 0): 1}
    found = llm.captures.collect("watch")
    assert [one.request_id for one in found] == [first.request_id, second.request_id]
    for one in found:
        assert_same(one.activations, expected)
        assert one.generated_token_ids == tuple(first.outputs[0].token_ids)
    assert llm.captures.collect("watch") == ()
