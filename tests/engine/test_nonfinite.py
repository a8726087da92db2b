"""Values that are not finite stay with their request, which is told of them."""

import numpy as np
import pytest
import torch
from engine.asking import ask_all
from support.engines import engine, generated

from midstream import Capture, Probe, Steer
from midstream.errors import ReceiptError
from midstream.ops import layout
from midstream.runtime.worker.session import WorkerSession

HIDDEN = 64
BLOCKS = 12
OTHERS = [[(11 * n + 7 * k) % 150 + 5 for n in range(20 + 9 * k)] for k in range(4)]
VICTIM = [(5 * n) % 150 + 5 for n in range(40)]


def steer(scale):
    return [Steer([1.0] * HIDDEN, layer=1, scale=scale)]


@pytest.fixture
def spoiled(monkeypatch):
    """The stream of rows that are edited by a scale of 7.25 becomes NaN after the op, as by an
    overflow in the model's own layers.
    """
    import midstream.runtime.worker.taps.taps as taps

    original = taps._fire

    def fire(layer, tap, hidden, residual):
        original(layer, tap, hidden, residual)
        if "spoil" in state and state["spoil"] is not None:
            rows = state["spoil"]
            hidden[rows] = float("nan")

    state = {"spoil": None}
    before = WorkerSession.before_forward

    def before_forward(self, batch):
        has_work = before(self, batch)
        prepared = self._recorder.prepared
        state["spoil"] = None
        if prepared is not None:
            plan = prepared.plan
            hit = [
                int(row)
                for row, slot in zip(
                    np.arange(len(plan.tokens))[plan.active], plan.slots, strict=True
                )
                if slot >= 0
                and any(
                    step.a == 7.25
                    for edit in self._recorder._slots.by_slot(int(slot)).plan.edits
                    for step in edit.steps.instructions
                )
            ]
            state["spoil"] = hit or None
        return has_work

    monkeypatch.setattr(taps, "_fire", fire)
    monkeypatch.setattr(WorkerSession, "before_forward", before_forward)
    return state


def run(llm, prompts, asked, **options):
    return ask_all(llm, prompts, 6, steer=asked, **options)


@pytest.fixture(scope="module")
def few_blocks(tiny_llama):
    settings = {"sites": ["resid_mid", "resid_post"]}
    with engine(
        tiny_llama,
        num_gpu_blocks_override=BLOCKS,
        block_size=32,
        max_num_seqs=8,
        midstream=settings,
    ) as llm:
        yield llm


def test_an_edit_that_saturates_ends_its_request_and_changes_no_other(few_blocks):
    llm = few_blocks
    before = [generated(one) for one in run(llm, OTHERS, None)]
    largest = [Steer([layout.LIMIT] + [0.0] * (HIDDEN - 1), layer=1)] * 2
    with pytest.raises(ReceiptError, match="position 0: a value is not finite, or an") as caught:
        run(llm, [VICTIM, *OTHERS], [largest, *[None] * 4])
    bad, *beside = caught.value.outputs
    assert (bad.receipt.status, bad.receipt.nonfinite.first) == ("error", 0)
    # It ended before a token was returned: the last position of its prompt is not in the receipt.
    assert bad.receipt.nonfinite.positions == len(VICTIM) - 1
    assert [generated(one) for one in beside] == before
    for _ in range(BLOCKS // 2):
        llm.reset_prefix_cache()
        assert [generated(one) for one in run(llm, OTHERS, None)] == before


def test_kv_that_is_not_finite_reaches_no_request_that_gets_its_blocks(few_blocks, spoiled):
    llm = few_blocks
    rows = Capture("all", positions="all")

    def alone():
        llm.reset_prefix_cache()
        return [
            (generated(one), one.activations["resid_post", 2].clone())
            for one in run(llm, OTHERS, None, capture=rows)
        ]

    before = alone()
    with pytest.raises(ReceiptError, match="not finite"):
        run(llm, [VICTIM] * 2, [steer(7.25)] * 2)
    for _ in range(BLOCKS):
        for (ids, found), (wanted_ids, wanted) in zip(alone(), before, strict=True):
            assert ids == wanted_ids
            assert torch.equal(found, wanted)


def test_captured_rows_and_scores_that_are_not_finite_are_in_the_receipt(few_blocks, spoiled):
    capture = Capture(2, positions="all")
    with pytest.raises(ReceiptError, match="position 0: a value") as caught:
        run(few_blocks, [VICTIM], [steer(7.25)], capture=capture)
    receipt = caught.value.outputs[0].receipt
    assert receipt.nonfinite.first == 0
    few_blocks.reset_prefix_cache()
    probe = Probe([1.0] * HIDDEN, layer=2, name="p")
    with pytest.raises(ReceiptError, match="position 0: a value"):
        run(few_blocks, [VICTIM], [steer(7.25)], probes=[probe])


def test_with_report_the_request_runs_on_and_shares_no_kv(tiny_llama, spoiled):
    with engine(tiny_llama, block_size=32, midstream={"on_nonfinite": "report"}) as llm:
        first = run(llm, [VICTIM], [steer(7.25)])[0]
        assert (first.receipt.status, first.receipt.problems) == ("partial", ())
        assert first.receipt.nonfinite.positions == len(VICTIM) + 5
        assert len(generated(first)) == 6
        again = run(llm, [VICTIM], [steer(7.25)])[0]
        assert again.num_cached_tokens == 0
        assert again.receipt.nonfinite == first.receipt.nonfinite
        plain = run(llm, [VICTIM], None)[0]
        assert plain.num_cached_tokens == 0
