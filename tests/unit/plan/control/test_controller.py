"""Controllers of requests: read from any form, and bound."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused, refused_calls

from midstream import Controller, Probe, Steer, Threshold
from midstream.errors import SpecError
from midstream.plan import Plan, Vector
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
    law, words = Threshold("p", 1.0), "unknown field 'pid'.*known: `threshold`, `declared`"
    probe, steer = Probe([1.0], 0, name="p"), Steer([1.0], 0)
    refused_calls(
        (lambda: Controller(print, mode="sync"), "mode", ""),
        (lambda: Controller("guard", mode="async"), "mode", ""),
        (lambda: Controller("a:b"), "decide", ""),
        (lambda: Controller(law, mode="sync", seconds=1), "seconds", ""),
        (lambda: Controller(law, edits={}), "edits", ""),
        (lambda: Controller(law, mode="sync", edits={"a": []}), "edits", ""),
        (lambda: Plan.make(probes=probe, controller=law), "controller", ""),
        (lambda: Controller("guard", edits={"a b": []}), "edits", ""),
        (lambda: Controller("guard", edits={"a": [steer, 3]}), "edits.a[1]", ""),
        (lambda: Controller(law, mode="sync", name="a/b"), "name", ""),
        (lambda: Plan.parse({"controller": {"pid": {"probe": "p"}}}), "controller", words),
    )
    refused(
        Controller.parse,
        (3, "", ""),
        ({}, "", ""),
        ({"threshold": {"probe": "p"}, "declared": "a"}, "", ""),
        ({"threshold": {"probe": "p", "above": 1, "on": None}}, "threshold.on", ""),
        ({"threshold": {"probe": "p", "over": 1}}, "threshold", ""),
        ({"threshold": 1}, "threshold", ""),
        ({"threshold": {"probe": 1, "above": 1}}, "threshold.probe", ""),
        ({"threshold": {"probe": "p", "above": "x"}}, "threshold.above", ""),
        ({"declared": "a", "mode": "sync"}, "", ""),
        (Controller(law), "mode", ""),
    )
