"""Controllers of requests: read from any form, and bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream import Controller, Plan, Probe, SpecError, Steer, Threshold, Vector
from midstream.plan.control.control_laws import Observed

numbers = st.floats(-100, 100, width=32)
thresholds = st.builds(
    Threshold, st.just("p"), above=st.floats(0, 9), below=st.none() | st.floats(-9, 0),
    on=numbers, off=numbers,
)  # fmt: skip


class Scores(list):
    """float32 [n], as far as a Threshold looks at it."""

    def tolist(self) -> list[float]:
        return list(self)


@given(thresholds, st.sampled_from([None, "off", "end"]), st.sampled_from([None, "named"]))
def test_a_plan_with_a_threshold_survives_its_dict_and_its_text(law, on_error, name):
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


@given(thresholds, st.lists(st.lists(numbers, max_size=3), max_size=12))
def test_a_threshold_answers_only_what_it_says(law, steps):
    scales = law.scales()
    for nth, scores in enumerate(steps):
        answer = law(Observed("r", nth + 1, {"p": Scores(scores)}))
        assert answer in scales
    assert hash(law) == hash(Threshold.parse(law.to_dict()))


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
        (lambda: Controller("guard", edits={"a b": []}), "edits"),
        (lambda: Controller("guard", edits={"a": [Steer([1.0], 0), 3]}), "edits.a[1]"),
        (lambda: Controller(law, mode="sync", name="a/b"), "name"),
        (lambda: Controller.parse(3), ""),
        (lambda: Controller.parse({}), ""),
        (lambda: Controller.parse({"threshold": {"probe": "p"}, "declared": "a"}), ""),
        (
            lambda: Controller.parse({"threshold": {"probe": "p", "above": 1, "on": None}}),
            "threshold.on",
        ),
        (lambda: Controller.parse({"threshold": {"probe": "p", "over": 1}}), "threshold"),
        (lambda: Controller.parse({"threshold": 1}), "threshold"),
        (lambda: Controller.parse({"threshold": {"probe": 1, "above": 1}}), "threshold.probe"),
        (lambda: Controller.parse({"threshold": {"probe": "p", "above": "x"}}), "threshold.above"),
        (lambda: Controller.parse({"declared": "a", "mode": "sync"}), ""),
        (lambda: Controller.parse(Controller(law)), "mode"),
    ):
        with pytest.raises(SpecError) as caught:
            make()
        assert caught.value.path == path


def test_an_unknown_law_is_refused_by_its_name_with_those_that_there_are():
    words = "unknown field 'pid'.*known: `threshold`, `declared`"
    with pytest.raises(SpecError, match=words) as caught:
        Plan.parse({"controller": {"pid": {"probe": "p", "target": 1.0}}})
    assert caught.value.path == "controller"
