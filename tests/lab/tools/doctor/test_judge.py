"""Verdicts, from answers that a transformers model gave in vLLM's place: right ones, ones with a
tap at the wrong place, and ones of a model that is itself another.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf
from support.nightly import NIGHTLY

from midstream.lab.tools.doctor import cases as trying
from midstream.lab.tools.doctor import formulas
from midstream.lab.tools.doctor.cases import Case
from midstream.lab.tools.doctor.judge import CaseOutputs, Judgement, judge
from midstream.lab.tools.doctor.model_copy import save_copy, small_config
from midstream.lab.tools.doctor.reference import Reference
from midstream.lab.tools.doctor.report import INCOMPARABLE, LACKING, OK, STATUS, UNCOMPARED, WRONG
from midstream.lab.tools.doctor.small_config import Size
from midstream.plan.shape import ModelShape
from midstream.results.site_table import SiteTable
from midstream.sites import IN_LAYERS, OUTER

ENDS = [("embed", 0), ("final_norm", 1)]
TAPS = [(site, layer) for site in IN_LAYERS if site != "router" for layer in range(2)] + ENDS
# One of each site, at one layer or the other.
SOME = [(site, nth % 2) for nth, site in enumerate(IN_LAYERS) if site != "router"] + ENDS
TABLE = SiteTable.of(ModelShape(2, 64, TAPS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("copy")
    save_copy(small_config(hf.LlamaConfig(), Size(2)), found, 3)
    return found


def looked(folder: Path) -> Reference:
    found = Reference(folder)
    found.find_sites(trying.prompts(found.vocabulary, 0)[-1])
    return found


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return looked(folder)


def answer(model: Reference, case: Case) -> Any:
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


def judged(
    reference: Reference,
    asked: tuple[list[Case], list[Case]],
    answers: list[Any],
    spoil: Callable[[Any], None] = lambda output: None,
) -> Judgement:
    """The verdict on these answers, each of them spoilt first."""
    plain, edited = asked
    outputs = [
        SimpleNamespace(**{**vars(one), "activations": {**one.activations}}) for one in answers
    ]
    for output in outputs:
        spoil(output)
    read = CaseOutputs(plain, outputs[: len(plain)])
    done = CaseOutputs(edited, outputs[len(plain) :])
    return judge(reference, TABLE, read, done, "float32")


@pytest.fixture(scope="module")
def asked(reference: Reference) -> tuple[list[Case], list[Case]]:
    return trying.plain_cases(reference, 0), trying.operation_cases(reference, 0)


@pytest.fixture(scope="module")
def right(reference: Reference, asked: tuple[list[Case], list[Case]]) -> list[Any]:
    return [answer(reference, case) for case in [*asked[0], *asked[1]]]


@pytest.fixture(scope="module")
def model(folder: Path) -> Reference:
    """Attention and MLPs compute something else; all else is the same."""
    found = looked(folder)
    for layer in found.layers:
        layer.self_attn.o_proj.weight.data *= 1.3
        layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data.flip(0)
    return found


@pytest.fixture(scope="module")
def another(model: Reference, asked: tuple[list[Case], list[Case]]) -> list[Any]:
    return [answer(model, case) for case in [*asked[0], *asked[1]]]


def undone(case: Case) -> Case:
    """The same without its edit."""
    return Case(**{**vars(case), "edit": None})


def halve(tap: tuple[str, int]) -> Callable[[Any], None]:
    def spoil(output: Any) -> None:
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


def test_a_model_that_is_another_is_not_comparable_though_each_site_fits_its_neighbours(
    reference, asked, another
):
    found = judged(reference, asked, another)
    assert (found.outcome, STATUS[found.outcome]) == (INCOMPARABLE, 2)
    assert re.match(r"vLLM itself differs from transformers by \d\.\de", found.reason)
    for one in [*found.sites, *found.operations]:
        if one.site == "router":
            assert one.outcome == LACKING
        else:
            # Nothing can be told of what is inside a module that computes something else.
            assert one.outcome == (OK if one.site in OUTER else UNCOMPARED)
            assert one.site in OUTER or "computes this model's modules differently" in one.reason


def test_a_layer_class_whose_branch_is_scaled_is_not_comparable(folder, reference, asked):
    scaled = looked(folder)
    for layer in scaled.layers:
        layer.mlp.down_proj.weight.data *= 0.3
    found = judged(reference, asked, [answer(scaled, case) for case in [*asked[0], *asked[1]]])
    assert found.outcome == INCOMPARABLE


def test_a_stale_branch_of_attention_is_not_ok_in_a_model_that_is_another(
    reference, asked, another
):
    """Attention's output is read one token late; the streams around it are right."""

    def spoil(output: Any) -> None:
        for layer in range(2):
            late = output.activations["attn_out", layer].roll(1, dims=0)
            output.activations["attn_out", layer] = late

    assert STATUS[judged(reference, asked, another, spoil).outcome] != 0


@pytest.mark.parametrize("tap", [tap for tap in SOME if tap[0] in OUTER][:: 1 if NIGHTLY else 3])
def test_a_site_that_is_read_wrongly_of_a_model_that_is_another_is_wrong_still(
    reference, asked, another, tap
):
    found = judged(reference, asked, another, halve(tap))
    assert found.outcome == WRONG
    assert tap in {(one.site, one.layer) for one in found.sites if one.outcome == WRONG}


def test_an_edit_that_is_not_done_to_a_model_that_is_another_is_wrong_still(
    reference, model, asked, another
):
    plain, edited = asked
    done = [
        answer(model, undone(case)) if case.name == "Steer" else there
        for case, there in zip(edited, another[len(plain) :], strict=True)
    ]
    found = judged(reference, asked, [*another[: len(plain)], *done])
    bad = {(one.name, one.site) for one in found.operations if one.outcome == WRONG}
    assert bad == {("Steer", site) for site in OUTER}


def test_outputs_that_are_no_numbers_are_not_blamed_on_the_taps(reference, asked, right):
    nothing = SimpleNamespace(logprob=float("nan"))

    def spoil(output: Any) -> None:
        (one,) = output.outputs
        steps = [dict.fromkeys(step, nothing) for step in one.logprobs]
        output.outputs = [SimpleNamespace(token_ids=one.token_ids, logprobs=steps)]
        output.activations = {
            tap: value * float("nan") for tap, value in output.activations.items()
        }

    found = judged(reference, asked, right, spoil)
    assert found.outcome == UNCOMPARED
    assert "are not finite" in found.reason
