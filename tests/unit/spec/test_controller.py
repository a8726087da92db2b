"""Controllers of requests: read from any form, bound, and the scales that laws can answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import (
    Budget,
    Controller,
    Decay,
    Pid,
    Plan,
    Probe,
    SpecError,
    Steer,
    Threshold,
    Vector,
)
from midstream.spec.control_laws import MOST_SCALES, Observed

numbers = st.floats(-100, 100, width=32)
laws = st.one_of(
    st.builds(Threshold, st.just("p"), above=st.floats(0, 9), below=st.none() | st.floats(-9, 0),
              on=numbers, off=numbers),
    st.builds(Pid, st.just("p"), target=numbers, kp=numbers, ki=numbers, kd=numbers,
              low=st.floats(-2, 0.5), high=st.floats(1, 2), step=st.floats(0.125, 0.25)),
    st.builds(Decay, st.integers(1, 9), least=st.floats(0.001, 1)),
    st.builds(Budget, st.just("p"), total=st.floats(0.125, 100)),
)  # fmt: skip


class Scores(list):
    """float32 [n], as far as laws look at it."""

    def tolist(self) -> list[float]:
        return list(self)


@given(laws, st.sampled_from([None, "off", "end"]), st.sampled_from([None, "named"]))
def test_a_plan_with_a_law_survives_its_dict_and_its_text(law, on_error, name):
    controller = Controller(law, mode="sync", on_error=on_error, name=name)
    check_survives(controller)
    edits = {"calm": Steer([1.0, 2.0], 0), "none": []}
    check_survives(Controller("guard", on_error=on_error, name=name, edits=edits))


def check_survives(controller):
    edit, probe = Steer([1.0], 0), Probe([1.0], 0, name="p")
    plan = Plan.make(edits=edit, probes=probe, controller=controller)
    for found in (Plan.parse(plan.to_dict()), Plan.parse(plan.to_json())):
        assert found == plan
        assert hash(found) == hash(plan)


@given(laws, st.lists(st.lists(numbers, max_size=3), max_size=12))
def test_a_law_answers_only_what_it_says(law, steps):
    scales = law.scales()
    for nth, scores in enumerate(steps):
        answer = law(Observed("r", nth + 1, {"p": Scores(scores)}))
        assert answer is None or answer in scales
    assert hash(law) == hash(type(law)(*[getattr(law, name) for name in parameters(law)]))


@given(laws, st.lists(st.lists(numbers, max_size=3), max_size=12))
def test_pid_stays_within_its_limits(law, steps):
    for nth, scores in enumerate(steps):
        answer = law(Observed("r", nth + 1, {"p": Scores(scores)}))
        if isinstance(law, Pid) and answer is not None:
            assert law.low - 1e-5 <= answer <= law.high + 1e-5


def test_a_limit_that_is_a_multiple_of_the_step_is_reached():
    law = Pid("p", target=0.0, kp=10.0, low=0.3, high=0.7, step=0.1)
    found = [law(Observed("r", 1, {"p": Scores([score])})) for score in (9.0, -9.0)]
    assert found == [pytest.approx(0.3), pytest.approx(0.7)]
    assert len(law.scales()) == 5


def test_a_limit_between_two_multiples_of_the_step_is_not_passed():
    law = Pid("p", target=0.0, kp=10.0, low=0.34, high=0.66, step=0.1)
    found = [law(Observed("r", 1, {"p": Scores([score])})) for score in (9.0, -9.0)]
    assert found == [pytest.approx(0.4), pytest.approx(0.6)]


def parameters(law):
    return [
        name for name in law.__dataclass_fields__ if not name.startswith("_") and name != "word"
    ]


def test_a_law_with_too_many_scales_says_more_than_the_limit_and_no_more():
    for law in (Pid("p", 0.0, 1.0, step=1e-9), Decay(1, least=1e-300)):
        assert MOST_SCALES < len(law.scales()) <= MOST_SCALES + 2


def test_names_of_its_edits_are_bound():
    vectors = {"calm": Vector.parse([1.0, 2.0])}
    controller = Controller("guard", edits={"a": Steer("calm", 0), "b": []})
    plan = Plan.make(probes=Probe([1.0], 0, name="p"), controller=controller)
    assert plan.names() == ("calm",)
    bound = plan.bind(lambda name: {None: vectors[name]})
    assert [one.edits for one in bound.controller.edits] == [(Steer([1.0, 2.0], 0),), ()]
    assert bound.controller.name == "guard"
    assert bound.bind(lambda name: {}) is bound

    def unknown(name):
        raise SpecError("", f"no {name}")

    with pytest.raises(SpecError) as caught:
        plan.bind(unknown)
    assert caught.value.path.startswith("controller.edits.a[0]")


def test_what_is_malformed_says_so():
    law = Threshold("p", 1.0)
    for make, path in (
        (lambda: Controller(print, mode="sync"), "mode"),
        (lambda: Controller("guard", mode="async"), "mode"),
        (lambda: Controller("a:b"), "decide"),
        (lambda: Controller(law, mode="sync", seconds=1), "seconds"),
        (lambda: Controller(law, edits={}), "edits"),
        (lambda: Controller(law, mode="sync", edits={"a": []}), "edits"),
        (lambda: Plan.make(probes=Probe([1.0], 0, name="p"), controller=law), "controller"),
        (lambda: Pid("p", 0.0, 1.0, low=0.3, high=0.4, step=0.25), "step"),
        (lambda: Pid("p", 0.0, 1.0, step=1e9), "step"),
        (lambda: Pid("p", 0.0, 1.0, step=0.0), "step"),
        (lambda: Pid("p", 0.0, 1.0, low=2.0, high=1.0), "low"),
        (lambda: Decay(3, least=0.0), "least"),
        (lambda: Decay(3, least=1.5), "least"),
        (lambda: Budget("p", 0.0), "total"),
        (lambda: Controller.parse({"budget": {"probe": "p", "total": -1.0}}), "budget.total"),
        (lambda: Controller("guard", edits={"a b": []}), "edits"),
        (lambda: Controller("guard", edits={"a": [Steer([1.0], 0), 3]}), "edits.a[1]"),
        (lambda: Controller(law, mode="sync", name="a/b"), "name"),
        (lambda: Controller.parse(3), ""),
        (lambda: Controller.parse({}), ""),
        (lambda: Controller.parse({"decay": {"half_life": 1}, "declared": "a"}), ""),
        (lambda: Controller.parse({"decay": {"half_life": 1.5}}), "decay.half_life"),
        (lambda: Controller.parse({"decay": {"half": 1}}), "decay"),
        (lambda: Controller.parse({"decay": 1}), "decay"),
        (lambda: Controller.parse({"threshold": {"probe": 1, "above": 1}}), "threshold.probe"),
        (lambda: Controller.parse({"pid": {"probe": "p", "target": "x", "kp": 1}}), "pid.target"),
        (lambda: Controller.parse({"declared": "a", "mode": "sync"}), ""),
        (lambda: Controller.parse(Controller(law)), "mode"),
    ):
        with pytest.raises(SpecError) as caught:
            make()
        assert caught.value.path == path
