"""Doses of edits in receipts, compared with transformers and plain hooks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.asking import ask, ask_all, preempting
from support.dose_oracle import TOLERANCE, assert_doses, each_kind, vector
from support.engines import engine, greedy
from support.oracle_edits import At, EditOracle

from midstream import Ablate, Gate, Probe, Steer
from midstream.errors import ReceiptError, ScaleWarning, SpecError
from midstream.plan import Switch
from midstream.results.receipt import Dose
from midstream.runtime.frontend.results import doses

LONG = [(13 * n) % 190 + 3 for n in range(150)]  # in chunks of 64
SHORT = [5, 17, 33, 101, 8, 77, 54, 23, 9]


def test_doses_are_those_of_plain_hooks_in_a_batch_with_chunks_and_an_idle_request(
    llm: Any, oracle: EditOracle
) -> None:
    long, short = each_kind(len(LONG)), each_kind(len(SHORT))
    edits = [[at.edit for at in long], None, [at.edit for at in short]]
    outputs = ask_all(llm, [LONG, SHORT, SHORT], 6, edits=edits)
    assert_doses(outputs[0], LONG, long, oracle)
    assert_doses(outputs[2], SHORT, short, oracle)
    assert not hasattr(outputs[1], "receipt")


def test_the_dose_of_an_addition_is_the_scale_times_the_vector_by_the_row(
    llm: Any, oracle: EditOracle
) -> None:
    v = vector(7)
    output = ask(llm, SHORT, 5, edits=[Steer(v, 1, scale=-0.8)])
    (dose,) = output.receipt.edited.doses
    tokens = [*SHORT, *output.outputs[0].token_ids][:-1]
    rows = oracle.run(tokens, [At(Steer(v, 1, scale=-0.8))]).before["resid_post", 1]
    ratios = 0.8 * v.norm() / rows.norm(dim=1)
    assert dose.mean == pytest.approx(float(ratios.mean()), rel=TOLERANCE)
    assert dose.largest == pytest.approx(float(ratios.max()), rel=TOLERANCE)
    assert dose.tokens == len(tokens)
    assert str(dose).startswith("edits[0] at resid_post of layer 1: dose ")
    assert str(dose) in str(output.receipt)
    kept = type(output.receipt).from_dict(output.receipt.to_dict())
    assert kept.edited.doses == (dose,)


def test_tokens_that_are_computed_again_count_once(llm: Any, oracle: EditOracle) -> None:
    edits = [At(Steer(vector(1), 0, scale=0.3)), At(Ablate(vector(3), layer=1))]
    with preempting(llm, 3, 40):
        output = ask(llm, LONG, 60, edits=[at.edit for at in edits])
    assert_doses(output, LONG, edits, oracle)


def test_tokens_of_the_prefix_cache_are_not_measured_and_counted_as_cached(
    llm: Any, oracle: EditOracle
) -> None:
    edits = [At(Steer(vector(8), 0, scale=0.3))]
    for cached in (0, 128):
        output = ask(llm, LONG, 4, edits=[edits[0].edit])
        assert output.receipt.edited.cached == cached
        assert_doses(output, LONG, edits, oracle, cached)


def test_a_closed_gate_has_a_dose_of_zero_and_edits_by_token_count_where_they_apply(
    llm: Any, oracle: EditOracle
) -> None:
    closed = Gate(Steer(vector(1), 1), vector(2), threshold=1e6)
    chosen = SHORT[3]
    by_token = Steer(vector(1), 1, positions={"tokens": [chosen]})
    output = ask(llm, SHORT, 4, edits=[closed, by_token])
    first, second = output.receipt.edited.doses
    assert (first.mean, first.largest, first.tokens) == (0, 0, len(SHORT) + 3)
    tokens = [*SHORT, *output.outputs[0].token_ids][:-1]
    assert second.tokens == tokens.count(chosen)
    assert second.mean > 0


def test_a_request_has_the_doses_that_it_has_alone(llm: Any) -> None:
    edits = [[Steer(vector(n), n % 3, scale=0.1 * n)] for n in range(1, 7)]
    prompts = [[(7 * k + n) % 150 + 4 for k in range(9 + 8 * n)] for n in range(6)]
    together = ask_all(llm, prompts, 5, edits=edits)
    for prompt, edit, output in zip(prompts, edits, together, strict=True):
        llm.reset_prefix_cache()
        (alone,) = ask(llm, prompt, 5, edits=edit).receipt.edited.doses
        (dose,) = output.receipt.edited.doses
        assert dose.mean == pytest.approx(alone.mean, rel=1e-4)
        assert dose.tokens == alone.tokens


def test_versions_of_a_plan_have_doses_of_their_own(llm: Any, oracle: EditOracle) -> None:
    weak, strong = Steer(vector(1), 0, scale=0.1), Steer(vector(1), 1, scale=0.6)
    probe = Probe(vector(9), 1, name="any", act=Switch(above=-1e9, edits=[strong]))
    output = ask(llm, SHORT, 8, edits=[weak], probes=[probe])
    first, second = output.receipt.edited.doses
    held = output.receipt.versions
    assert (first.what, first.layer) == ("versions[0].edits[0]", 0)
    assert (second.what, second.layer) == ("versions[1].edits[0]", 1)
    counts = [stop - start for start, stop in (version.positions for version in held)]
    assert [first.tokens, second.tokens] == counts
    assert min(counts) > 0


def test_a_request_beyond_the_largest_dose_ends_and_no_other_does(tiny_llama: Path) -> None:
    bounded = {"max_dose": 1.5, "doses": 2, "on_mismatch": "warn"}
    strong, weak = Steer(vector(1), 1, scale=1e3), Steer(vector(1), 1, scale=0.01)
    with engine(tiny_llama, block_size=32, midstream=bounded) as llm:
        with pytest.warns() as caught:
            outputs = ask_all(llm, [LONG, SHORT, LONG], 4, edits=[[strong], [weak], None])
        ended, going, plain = outputs
        assert ended.outputs[0].finish_reason == "error"
        (problem, *_) = ended.receipt.problems
        assert "edits[0] changed resid_post of layer 1 by " in problem
        assert "max_dose is 1.5; use a smaller scale" in problem
        assert problem.startswith("position 0: ")
        assert any("max_dose" in str(warning.message) for warning in caught)
        assert going.receipt.status == "ok"
        assert len(plain.outputs[0].token_ids) == 4
        # What it left in the prefix cache is not served: the next one ends as well.
        with pytest.warns():
            again = ask(llm, LONG, 4, edits=[strong])
        assert again.receipt.edited.cached == 0
        assert again.receipt.status == "error"
        with pytest.raises(SpecError, match=r"edits\[0\].*3 edits.*setting doses is 2"):
            ask(llm, SHORT, 4, edits=[Steer(vector(1), "all", scale=0.01)])


def test_with_raise_the_error_names_edit_site_layer_dose_and_bound(tiny_llama: Path) -> None:
    settings = {"doses": 64, "max_dose": 0.5, "sites": ["resid_pre"]}
    with engine(tiny_llama, midstream=settings) as llm:
        steer = Steer(vector(1), 2, site="resid_pre", scale=1e3, positions="generated")
        with pytest.raises(ReceiptError, match=r"changed resid_pre of layer 2 by [\d.e+]+ times"):
            ask(llm, SHORT, 6, edits=[steer])


def test_without_columns_there_are_no_doses_and_all_else_is_the_same(
    tiny_llama: Path, llm: Any
) -> None:
    steer = [Steer(vector(1), 1, scale=0.2)]
    params = greedy(6, detokenize=False, logprobs=3)
    with engine(tiny_llama, block_size=32) as bare:
        output = ask(bare, SHORT, params, edits=steer)
    measured = ask(llm, SHORT, params, edits=steer)
    assert output.receipt.edited.doses == ()
    assert len(measured.receipt.edited.doses) == 1
    assert output.outputs[0].token_ids == measured.outputs[0].token_ids


def test_of_more_edits_than_columns_the_first_are_measured(tiny_llama: Path) -> None:
    with engine(tiny_llama, midstream={"doses": 2}) as llm:
        output = ask(llm, SHORT, 4, edits=[Steer(vector(1), "all", scale=0.2)])
    assert [dose.layer for dose in output.receipt.edited.doses] == [0, 1]


def test_an_edit_of_a_large_mean_dose_is_warned_of_once(
    llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doses, "_warned", set())
    steer = Steer(vector(1), 1, scale=200.0)
    with pytest.warns(ScaleWarning, match=r"edits\[0\] changed resid_post of layer 1 by .* times"):
        ask(llm, SHORT, 2, edits=[steer])
    assert doses._warned == {("edits[0]", "resid_post", 1)}
    doses.warn_of_doses([Dose("edits[0]", "resid_post", 2, 9.0, 9.0, 3)], None)
    doses.warn_of_doses([Dose("edits[0]", "resid_post", 2, 1.9, 9.0, 3)], 2.0)
    assert len(doses._warned) == 1


def test_in_half_precision_doses_are_those_of_float32_to_within_its_rounding(
    tiny_llama: Path, oracle: EditOracle
) -> None:
    v = vector(1)
    with engine(tiny_llama, dtype="bfloat16", midstream={"doses": 64, "warn_dose": 2.0}) as llm:
        output = ask(llm, SHORT, 4, edits=[Steer(v, 1, scale=0.5)])
    tokens = [*SHORT, *output.outputs[0].token_ids][:-1]
    rows = oracle.run(tokens).values["resid_post", 1]
    (dose,) = output.receipt.edited.doses
    assert dose.mean == pytest.approx(float((0.5 * v.norm() / rows.norm(dim=1)).mean()), rel=0.02)
    assert np.isfinite(dose.largest)
