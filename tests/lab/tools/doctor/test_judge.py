"""Verdicts on answers of transformers in vLLM's place: right, tapped wrongly, of another model."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import transformers as hf
from support.nightly import NIGHTLY

from midstream.lab.tools.doctor import cases as trying
from midstream.lab.tools.doctor import formulas
from midstream.lab.tools.doctor.cases import Case
from midstream.lab.tools.doctor.judge import CaseOutputs, Judgement, judge, merge
from midstream.lab.tools.doctor.model_copy import save_copy, small_config
from midstream.lab.tools.doctor.reference import Reference
from midstream.lab.tools.doctor.report import (
    INCOMPARABLE,
    OK,
    STATUS,
    UNCOMPARED,
    WRONG,
    SiteFound,
)
from midstream.lab.tools.doctor.small_config import Size
from midstream.plan.shape import ModelShape
from midstream.results.site_table import SiteTable
from midstream.sites import IN_LAYERS

ENDS = [("embed", 0), ("final_norm", 1)]
TAPS = [(site, layer) for site in IN_LAYERS if site != "router" for layer in range(2)] + ENDS
# One of each site, at one layer or the other.
SOME = [(site, nth % 2) for nth, site in enumerate(IN_LAYERS) if site != "router"] + ENDS
TABLE = SiteTable.of(ModelShape(2, 64, TAPS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("copy")
    save_copy(small_config(hf.LlamaConfig(), Size(2)), found, 3)
    return found


def looked(folder):
    found = Reference(folder)
    found.find_sites(trying.prompts(found.vocabulary, 0)[-1])
    return found


@pytest.fixture(scope="module")
def reference(folder):
    return looked(folder)


def answer(model, case):
    """What a vLLM with this model would give back."""
    changes = {}
    if case.edit is not None:
        changes = {case.tap: lambda rows: formulas.apply(case.edit, rows, case.heads)}
    tokens, seen = model.generate(case.prompt, len(case.tokens), changes)
    steps = seen.logits[len(case.prompt) - 1 :].log_softmax(dim=-1)
    logprobs = [
        {token: SimpleNamespace(logprob=float(step[token])) for token in step.topk(3)[1].tolist()}
        for step in steps
    ]
    probes = {}
    if case.probe is not None:
        probes = {"score": formulas.score(case.probe, seen.values[case.tap], case.heads)}
    return SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=tokens, logprobs=logprobs)],
        activations=dict(seen.values),
        probes=probes,
        receipt=SimpleNamespace(problems=()),
    )


def judged(reference, asked, answers, spoil=lambda output: None, dtype="float32"):
    """The verdict on these answers, each of them spoilt first."""
    plain, edited = asked
    outputs = [
        SimpleNamespace(**{**vars(one), "activations": {**one.activations}}) for one in answers
    ]
    for output in outputs:
        spoil(output)
    read = CaseOutputs(plain, outputs[: len(plain)])
    done = CaseOutputs(edited, outputs[len(plain) :])
    return judge(reference, TABLE, read, done, dtype)


@pytest.fixture(scope="module")
def asked(reference):
    return trying.plain_cases(reference, 0), trying.operation_cases(reference, 0)


@pytest.fixture(scope="module")
def right(reference, asked):
    return [answer(reference, case) for case in [*asked[0], *asked[1]]]


@pytest.fixture(scope="module")
def model(folder):
    """Attention and MLPs compute something else; all else is the same."""
    found = looked(folder)
    for layer in found.layers:
        layer.self_attn.o_proj.weight.data *= 1.3
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data.flip(0)
    return found


@pytest.fixture(scope="module")
def another(model, asked):
    return [answer(model, case) for case in [*asked[0], *asked[1]]]


def undone(case):
    """The same without its edit."""
    return Case(**{**vars(case), "edit": None})


def halve(tap):
    def spoil(output):
        output.activations[tap] = 0.5 * output.activations[tap]

    return spoil


def test_right_answers_are_ok(reference, asked, right):
    found = judged(reference, asked, right)
    assert (found.outcome, found.reason) == (OK, "")
    assert {one.site for one in found.sites if one.outcome != OK} == {"router"}
    assert {one.name for one in found.operations} == {*trying.OPERATIONS, *trying.OF_PARTS}


@pytest.mark.parametrize("tap", SOME[:: 1 if NIGHTLY else 2])
def test_a_site_that_is_read_wrongly_is_wrong_there_alone(reference, asked, right, tap):
    found = judged(reference, asked, right, halve(tap))
    assert found.outcome == WRONG
    assert [(one.site, one.layer) for one in found.sites if one.outcome == WRONG] == [tap]
    assert f"{tap[0]} of layer {tap[1]}" in found.reason


@pytest.mark.parametrize(
    "name", sorted({*trying.OPERATIONS, *trying.OF_PARTS} - {"Probe", "Probe of a head"})
)
def test_an_edit_that_is_not_done_is_wrong(reference, asked, right, name):
    plain, edited = asked
    mine = [case for case in edited if case.name == name][-1:]
    outputs = [*right[: len(plain)], *(answer(reference, undone(case)) for case in mine)]
    found = judged(reference, (plain, mine), outputs)
    assert found.outcome == WRONG
    assert [(one.name, one.outcome) for one in found.operations] == [(name, WRONG)]
    assert found.reason.startswith(f"{name} at")


def test_a_model_that_is_another_is_not_comparable(reference, asked, another):
    found = judged(reference, asked, another)
    assert (found.outcome, STATUS[found.outcome]) == (INCOMPARABLE, 2)
    assert re.match(r"vLLM itself differs from transformers by \d\.\de", found.reason)


def test_an_edit_that_does_too_little_to_verify_in_bfloat16_is_not_compared(
    reference, asked, right
):
    found = judged(reference, asked, right, dtype="bfloat16")
    assert (found.outcome, found.reason) == (OK, "")
    little = [one for one in found.operations if one.outcome == UNCOMPARED]
    assert 0 < len(little) < len(found.operations)
    assert all("too little to verify" in one.reason for one in little)
    assert {one.outcome for one in found.operations} == {OK, UNCOMPARED}


@pytest.mark.parametrize("tap", [("resid_mid", 0), ("mlp_out", 1), ("q", 1)])
def test_a_site_that_is_read_wrongly_is_wrong_in_bfloat16_too(reference, asked, right, tap):
    found = judged(reference, asked, right, halve(tap), dtype="bfloat16")
    assert found.outcome == WRONG
    assert [(one.site, one.layer) for one in found.sites if one.outcome == WRONG] == [tap]


def judgement(outcome, **sites):
    """A judgement with these outcomes of sites of layer 0."""
    found = [
        SiteFound(site, 0, said, 0.5 if said == WRONG else None) for site, said in sites.items()
    ]
    return Judgement(tuple(found), (), outcome, "", 0.1)


def test_what_vllms_own_modules_say_of_a_site_stands_and_transformers_tells_of_the_others():
    theirs = judgement(WRONG, resid_pre=WRONG, q=OK, k=WRONG, v=WRONG)
    k = replace(theirs.sites[2], error=1.6)
    theirs = replace(theirs, sites=(*theirs.sites[:2], k, theirs.sites[3]))
    own = judgement(OK, resid_pre=OK, q=UNCOMPARED, k=UNCOMPARED, v=UNCOMPARED)
    found = merge(theirs, own)
    # It is off by 0.5 where those prove that the row is right: at v, that says nothing.
    assert [one.outcome for one in found.sites] == [OK, OK, WRONG, UNCOMPARED]
    assert (found.outcome, found.reason) == (WRONG, "k of layer 0 (off by 1.6e+00)")


def test_what_differs_no_more_than_right_sites_in_half_precision_is_no_evidence():
    taps = [("resid_pre", OK, 0.12), ("q", WRONG, 0.35), ("k", WRONG, 0.37)]
    found = [SiteFound(site, 0, said, error) for site, said, error in taps]
    theirs = Judgement(tuple(found), (), WRONG, "", 0.15)
    own = judgement(OK, resid_pre=OK, q=UNCOMPARED, k=UNCOMPARED)
    merged = merge(theirs, own)
    assert [one.outcome for one in merged.sites] == [OK, UNCOMPARED, WRONG]


def test_where_vllm_itself_differs_only_what_matches_transformers_is_shown():
    theirs = judgement(INCOMPARABLE, resid_pre=WRONG, q=OK, k=WRONG)
    own = judgement(OK, resid_pre=OK, q=UNCOMPARED, k=UNCOMPARED)
    found = merge(theirs, own)
    assert [one.outcome for one in found.sites] == [OK, OK, UNCOMPARED]
    assert found.outcome == OK


def test_outputs_that_are_no_numbers_are_not_blamed_on_the_taps(reference, asked, right):
    nothing = SimpleNamespace(logprob=float("nan"))

    def spoil(output):
        (one,) = output.outputs
        steps = [dict.fromkeys(step, nothing) for step in one.logprobs]
        output.outputs = [SimpleNamespace(token_ids=one.token_ids, logprobs=steps)]
        output.activations = {
            tap: value * float("nan") for tap, value in output.activations.items()
        }

    found = judged(reference, asked, right, spoil)
    assert found.outcome == UNCOMPARED
    assert "are not finite" in found.reason
