"""What goes wrong on a worker for one request ends that request, named, and nobody else's."""

import pytest
import torch
from support.engine_view import inspect
from support.engines import engine, generated, greedy, tokens

from midstream import Capture, Steer
from midstream.errors import ReceiptError, ReceiptWarning
from midstream.ops import layout
from midstream.runtime.worker import plan_table
from midstream.runtime.worker.request_state import acquire_segments
from midstream.runtime.worker.session import WorkerSession

HIDDEN = 64
PROMPT = [(11 * n) % 150 + 5 for n in range(100)]
BAD = 7.25  # the scale by which the faults below know their request


@pytest.fixture
def llm(wide):
    """Its steps hold several prompts."""
    return wide


@pytest.fixture
def broken(monkeypatch):
    """A worker on which a plan with the scale BAD cannot be taken in."""

    def acquire(pieces, tables, ledger, codecs, codec="raw"):
        if any(step.a == BAD for piece in pieces for edit in piece.edits for step in edit.steps):
            raise ZeroDivisionError("a fault planted by the test")
        return acquire_segments(pieces, tables, ledger, codecs, codec)

    monkeypatch.setattr(plan_table, "acquire_segments", acquire)


@pytest.fixture
def first_fails(monkeypatch):
    """A worker that cannot take in the first request that asks for something."""
    calls = []

    def acquire(*args):
        calls.append(args)
        if len(calls) == 1:
            raise ZeroDivisionError("the first one fails")
        return acquire_segments(*args)

    monkeypatch.setattr(plan_table, "acquire_segments", acquire)


def steer(scale, start=0):
    return Steer([1.0] * HIDDEN, layer=1, scale=scale, positions=slice(start, None))


def ask(llm, asked, max_tokens=12, prompts=None):
    prompts = prompts or [PROMPT] * len(asked)
    return llm.generate(
        [tokens(prompt) for prompt in prompts], greedy(max_tokens), steer=asked, use_tqdm=False
    )


def clean(llm):
    inspect(llm).check_integrity()


def fresh(llm, nth):
    """A prompt that no other test has run."""
    return [5 + (nth * 37 + n * n) % 170 for n in range(70)]


def test_a_fault_on_the_worker_ends_the_request_that_it_is_about_and_no_other(llm, broken):
    prompts = [fresh(llm, nth) for nth in range(4)]
    asked = [[steer(2.0)], [steer(BAD)], None, [steer(3.0)]]
    expected = ask(llm, [[steer(2.0)], None, [steer(3.0)]], prompts=[*prompts[:1], *prompts[2:]])
    with pytest.raises(ReceiptError, match="ZeroDivisionError: a fault planted") as caught:
        ask(llm, asked, prompts=prompts)
    outputs = caught.value.outputs
    assert [len(output.outputs) for output in outputs] == [1] * 4
    bad = outputs.pop(1)
    assert f"request {bad.request_id}: " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert (bad.outputs[0].finish_reason, bad.receipt.status) == ("error", "error")
    assert len(generated(bad)) <= 1
    assert [generated(one) for one in outputs] == [generated(one) for one in expected]
    told = [hasattr(one, "receipt") and one.receipt.status for one in outputs]
    assert told == ["ok", False, "ok"]
    clean(llm)
    assert generated(ask(llm, [[steer(2.0)]], prompts=prompts[:1])[0]) == generated(expected[0])


def test_kv_that_a_failed_request_left_is_served_to_nobody(llm, first_fails):
    prompt = fresh(llm, 9)
    with pytest.raises(ReceiptError, match="the first one fails"):
        ask(llm, [[steer(BAD)]], prompts=[prompt])
    # The fault was that once; the same plan again finds none of its KV.
    after = ask(llm, [[steer(BAD)]], prompts=[prompt])[0]
    assert after.num_cached_tokens == 0
    llm.reset_prefix_cache()
    again, plain = (ask(llm, [one], prompts=[prompt])[0] for one in ([steer(BAD)], None))
    assert generated(after) == generated(again) != generated(plain)


def test_who_was_served_kv_of_a_request_that_failed_fails_with_it(llm, first_fails):
    # In one step: the second is served the blocks that the first is about to compute.
    prompt = fresh(llm, 21)
    llm.reset_prefix_cache()
    with pytest.raises(ReceiptError) as caught:
        ask(llm, [[steer(BAD)], [steer(BAD)], [steer(BAD, start=64)]], prompts=[prompt] * 3)
    first, second, third = caught.value.outputs
    assert "the first one fails" in first.receipt.problems[0]
    assert "served KV of a request that failed" in second.receipt.problems[0]
    assert third.receipt.status == "ok"
    alone = ask(llm, [[steer(BAD, start=64)]], prompts=[prompt])[0]
    assert generated(alone) == generated(third)
    clean(llm)


def test_a_token_that_was_not_edited_ends_its_request(llm, monkeypatch):
    prompt = fresh(llm, 33)
    original = WorkerSession.before_forward

    def before_forward(self, view):
        # The device is told nothing of the row at position 72, the third generated token.
        has_work = original(self, view)
        if 72 in view.computed:
            self._recorder._buffers.tokens[:, layout.PROGRAM] = layout.IDLE_PROGRAM
        return has_work

    monkeypatch.setattr(WorkerSession, "before_forward", before_forward)
    with pytest.raises(ReceiptError, match="position 72: expected 1 edits") as caught:
        ask(llm, [[steer(1.5)], None], max_tokens=40, prompts=[prompt, fresh(llm, 34)])
    bad, plain = caught.value.outputs
    assert bad.outputs[0].finish_reason == "error"
    assert 2 < len(generated(bad)) < 10
    assert len(generated(plain)) == 40
    # The next request with work is armed anew, in place of what this test wrote.
    ask(llm, [[steer(2.0)]], max_tokens=2, prompts=[fresh(llm, 35)])
    clean(llm)


def test_with_warn_the_outputs_come_with_a_warning(tiny_llama, broken):
    with engine(tiny_llama, midstream={"on_mismatch": "warn"}) as llm:
        with pytest.warns(ReceiptWarning, match="request 0: ZeroDivisionError"):
            outputs = ask(llm, [[steer(BAD)], [steer(2.0)]])
        assert [one.receipt.status for one in outputs] == ["error", "ok"]
        assert len(generated(outputs[1])) == 12
        captured = llm.generate(tokens(PROMPT), greedy(2), capture=Capture(0), use_tqdm=False)
        assert captured[0].receipt.status == "ok"
        assert torch.isfinite(captured[0].activations["resid_post", 0]).all()


def test_what_cannot_be_pinned_on_a_request_fails_loudly(tiny_llama, monkeypatch):
    with engine(tiny_llama) as llm:
        monkeypatch.setattr(WorkerSession, "before_forward", lambda self, view: 1 / 0)
        with pytest.raises(Exception, match="division by zero"):
            ask(llm, [[steer(1.0)]])
