"""`Route`: its fields, its instructions, and what a model's router must be for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.formulas import apply, run
from support.refusals import refused_calls

from midstream.errors import SpecError
from midstream.ops.layout import Flags
from midstream.plan import Gate, ModelShape, Plan, Positions, Prompt, Route
from midstream.plan.resolve.resolve import resolve
from midstream.plan.shape import VectorSize

EXPERTS, CHOSEN = 6, 3
SMALL, ROUTER, GROUPED = ("router", 0), ("router", 1), ("router", 2)
SHAPE = ModelShape(
    3,
    EXPERTS,
    [ROUTER, GROUPED, ("resid_pre", 0), SMALL],
    routing={SMALL: 1, ROUTER: CHOSEN, GROUPED: "its experts are chosen in groups"},
    widths={SMALL: 4},
)

eighths = st.integers(-32, 32).map(lambda number: number / 8)


@st.composite
def routes(draw: st.DrawFn) -> Route:
    experts = draw(st.permutations(range(EXPERTS)))
    activated = experts[: draw(st.integers(0, CHOSEN))]
    deactivated = experts[len(activated) :][: draw(st.integers(0, EXPERTS - CHOSEN))]
    bias = {}
    for expert in set(experts) - set(deactivated):
        number = draw(eighths)
        if number:
            bias[expert] = abs(number) if expert in activated else number
    if not (activated or deactivated or bias):
        activated = [0]
    return Route(activated, deactivated, bias or None, layer=1)


logits = st.lists(
    st.lists(eighths, min_size=EXPERTS, max_size=EXPERTS), min_size=1, max_size=3
).map(np.array)


@given(routes(), logits)
def test_its_instructions_compute_its_formula_and_choose_as_they_say(route, h):
    found = run(route.instructions(EXPERTS), h)
    assert np.allclose(found, apply(route, h), atol=1e-4)
    chosen = np.argsort(-found.astype(np.float32), axis=-1, kind="stable")[:, :CHOSEN]
    for row in chosen:
        assert set(route.activate) <= set(row.tolist())
        assert not set(route.deactivate) & set(row.tolist())
    others = set(range(EXPERTS)) - {*route.activate, *route.deactivate, *dict(route.bias)}
    assert np.array_equal(found[:, sorted(others)], h[:, sorted(others)])


@given(routes(), logits, st.booleans())
def test_behind_a_gate_it_is_all_or_nothing(route, h, is_open):
    gate = Gate(route, [0.0] * EXPERTS, threshold=-1.0 if is_open else 1.0)
    steps = gate.instructions(EXPERTS)
    assert all(Flags.GATED in step.flags for step in steps[1:])
    assert [step.counted for step in steps[1:]] == [False] * (len(steps) - 2) + [True]
    found = run(steps, h)
    assert np.array_equal(found, run(route.instructions(EXPERTS), h) if is_open else h)


def test_its_json_has_what_was_given():
    assert Route([7], [5, 1], {7: 2.0, 3: -1}, layers=3, positions="prompt").to_dict() == {
        "op": "route",
        "activate": [7],
        "deactivate": [1, 5],
        "bias": {"3": -1.0, "7": 2.0},
        "layer": 3,
        "site": "router",
        "positions": ["prompt"],
        "phase": "all",
    }
    assert Route(bias={"7": 2}, layer=3).to_dict()["bias"] == {"7": 2.0}
    assert Route(7, layer="all", phase="generated").positions == Positions("all", "generated")
    assert Route.parse({"activate": 7, "deactivate": [], "layer": 3}) == Route([7], layer=3)


def test_wrong_arguments_are_rejected_by_name():
    refused_calls(
        (lambda: Route(layer=0), "", "give `activate`, `deactivate` or `bias`"),
        (lambda: Route([], [], layer=0), "", "give `activate`, `deactivate` or `bias`"),
        (lambda: Route([1, 1], layer=0), "activate", "given twice"),
        (lambda: Route(-1, layer=0), "activate", "an index from 0 on, got -1"),
        (lambda: Route("7", layer=0), "activate", "`int` or a list"),
        (lambda: Route(1, [2, 1], layer=0), "deactivate", "expert 1 is in `activate` too"),
        (lambda: Route(bias=[1.0], layer=0), "bias", "expected {expert: number}, got `list`"),
        (lambda: Route(bias={}, layer=0), "bias", "1 to 4096 experts, got 0"),
        (lambda: Route(bias={3: 0}, layer=0), "bias[3]", "within ±500, not 0"),
        (lambda: Route(bias={3: 501}, layer=0), "bias[3]", "within ±500"),
        (lambda: Route(bias={"x": 1}, layer=0), "bias['x']", "expected `int`"),
        (lambda: Route(bias={-3: 1}, layer=0), "bias[-3]", "from 0 on"),
        (lambda: Route(bias={3: 1, "3": 2}, layer=0), "bias['3']", "given twice"),
        (lambda: Route(bias={3: "1"}, layer=0), "bias[3]", "expected a number"),
        (lambda: Route(1, bias={1: -1}, layer=0), "bias[1]", "it might not be chosen"),
        (lambda: Route(None, 1, {1: 1}, layer=0), "bias[1]", "in `deactivate`"),
        (lambda: Route(1), "layer", "missing"),
        (lambda: Route(1, layer=0, site="mlp_in"), "site", "at `router` only, got 'mlp_in'"),
        (lambda: Route(1, layer=0, positions="last_row"), "positions", "known only when"),
        (lambda: Gate(Route(1, layer=0), [1.0], sharpness=2), "sharpness", "chosen or not"),
    )


def test_a_soft_gate_is_for_a_bias_alone():
    gate = Gate(Route(bias={1: 2.0}, layer=0), [0.0] * EXPERTS, sharpness=1.0)
    assert np.allclose(run(gate.instructions(EXPERTS), np.zeros((1, EXPERTS)))[0, 1], 1.0)


def test_what_a_models_router_cannot_do_is_rejected():
    for route, path, problem in (
        (Route([0, 1, 2, 3], layer=1), "activate", "at most 3 experts, .* got 4"),
        (Route(None, [0, 1, 2, 3], layer=1), "deactivate", "2 of 6 experts are left, .* chooses 3"),
        (Route(6, layer=1), "activate", "6 is out of range: there are 6 experts"),
        (Route(None, 9, layer=1), "deactivate", "9 is out of range"),
        (Route(bias={6: 1}, layer=1), "bias", "6 is out of range"),
        (Route(1, layer=2), "activate", "chosen in groups; `bias` alone is supported"),
        (Route(None, 1, layer=2), "deactivate", "chosen in groups; `bias` alone is supported"),
        (Route(1, layer="all"), "activate", "chosen in groups"),
        (Route(bias={5: 1}, layer=[0, 1]), "bias", "there are 4 experts"),
    ):
        for edit, prefix in (
            (route, ""),
            (Gate(route, {"direction": [1.0] * 6, "layer": 0, "site": "resid_pre"}), "edit."),
        ):
            plan = Plan.make(None, edit)
            with pytest.raises(SpecError, match=problem) as caught:
                resolve(plan, SHAPE, Prompt(4), 2)
            assert caught.value.path == f"edits[0].{prefix}{path}"


def test_logits_of_float16_hold_what_it_makes_of_them():
    shape = ModelShape(1, 64, [SMALL], dtype="float16", routing={SMALL: 2})
    route = Route([0, 1], range(2, 60), {0: 500, 61: -500}, layer=0)
    assert len(resolve(Plan.make(None, route), shape, Prompt(4), 2).edits) == 1


def test_what_it_can_do_is_resolved():
    plan = Plan.make(None, [Route([0, 1, 2], [3, 4, 5], layer=1), Route(bias={5: 1}, layer=2)])
    found = resolve(plan, SHAPE, Prompt(4), 2).edits
    assert [(edit.site, edit.layer) for edit in found] == [ROUTER, GROUPED]
    with pytest.raises(SpecError, match=r"layer 0.*router|router.*layer 0"):
        resolve(
            Plan.make(None, Route(1, layer=0)),
            ModelShape(1, 4, [("resid_pre", 0)], {ROUTER[:1] + (0,): "this layer has no experts"}),
            Prompt(4),
            2,
        )


def test_a_size_without_what_is_known_of_its_router_takes_any():
    assert VectorSize(4).routing == 0
    assert len(Route([0, 1, 2, 3], layer=0).instructions(VectorSize(4))) == 1
