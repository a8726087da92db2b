"""`Stop`, `Switch` and `Flag`: their forms, and the rule by which scores meet a condition."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.conditions import first_met
from support.refusals import refused, refused_calls

from midstream import Gate, Local, Probe, Steer
from midstream.errors import SpecError
from midstream.plan import Flag, Plan, Stop, Switch
from midstream.plan.control.act import Progress, follow, read_act

POOLS = st.sampled_from(["none", "max", "mean:1", "mean:3", "mean:40", "ema:0.9", "ema:.5"])
# Eighths, and means of few of them: no two ways of adding up fall on different sides.
SCORES = st.lists(st.integers(-40, 40).map(lambda number: number / 8), max_size=40)
CONDITIONS = st.builds(
    lambda side, threshold, count, pool: {side: threshold + 1 / 1024, "for_": count, "pool": pool},
    st.sampled_from(["above", "below"]),
    st.integers(-20, 20).map(lambda number: number / 4),
    st.integers(1, 4),
    POOLS,
)


@given(CONDITIONS, st.sampled_from([Stop, Flag]))
def test_an_act_is_read_back_from_its_json_form(fields, kind):
    act = kind(**fields)
    assert read_act(json.loads(json.dumps(act.emit()))) == act
    probe = Probe([1.0, 2.0], 3, name="p", act=act)
    assert Probe.parse(json.loads(json.dumps(probe.to_dict()))) == probe
    assert probe.replace(layer=4).act == act


STEER = Steer([1.0, 2.0], 3, positions=[4])


@given(
    CONDITIONS,
    st.sampled_from([(), STEER, [STEER, Gate(Steer("calm", 2), {"direction": [1.0, 0.0]})]]),
)
def test_a_switch_is_read_back_from_its_json_form(fields, edits):
    act = Switch(edits, **fields)
    assert read_act(json.loads(json.dumps(act.emit()))) == act
    plan = Plan.make(probes=Probe([1.0, 2.0], 3, name="p", act=act))
    assert Plan.parse(plan.to_json()) == plan
    assert act != Switch([Steer([2.0, 2.0], 3)], **fields)
    assert plan.names() == (("calm",) if isinstance(edits, list) else ())


def test_names_in_a_switch_are_bound_with_the_plan():
    act = Switch([Steer("two", 1), STEER, Steer("two")], above=1.0)
    plan = Plan.make(probes=Probe([1.0, 2.0], 3, name="p", act=act))
    taps = {("resid_post", layer): Steer([1.0, float(layer)], 0).vector for layer in (1, 2)}
    bound = plan.bind(lambda name: taps, 4)
    (found,) = bound.switches
    assert [edit.layers.indices for edit in found.edits] == [(1,), (3,), (1,), (2,)]
    assert found.origins == (0, 1, 2, 2)
    assert bound.names() == ()
    assert bound.bind(lambda name: {}, 4) is bound

    def unknown(name):
        raise SpecError("", f"no {name}")

    with pytest.raises(SpecError, match="no two") as caught:
        plan.bind(unknown, 4)
    assert caught.value.path.startswith("probes[0].act.switch.edits[0]")


@given(SCORES, CONDITIONS, st.lists(st.integers(0, 40), max_size=4))
def test_a_condition_followed_in_parts_is_met_where_its_definition_says(scores, fields, cuts):
    wanted = first_met(scores, **fields)
    edges = [0, *sorted(min(cut, len(scores)) for cut in cuts), len(scores)]
    progress, found = Progress(), None
    for start, stop in zip(edges, edges[1:], strict=False):
        progress, met = follow(Stop(**fields), progress, scores[start:stop])
        if met is not None:
            found = start + met.nth
            break
    assert found == wanted


def test_a_score_that_is_not_finite_meets_nothing_and_does_not_stay():
    scores = [float("inf"), float("nan"), -float("inf"), 0.0, 5.0, 5.0]
    for pool in ("none", "max", "mean:2", "ema:0.5"):
        progress, met = follow(Stop(above=1.0, for_=2, pool=pool), Progress(), scores[:5])
        assert met is None
        _, met = follow(Stop(above=1.0, for_=2, pool=pool), progress, scores[5:])
        assert met is not None
        assert np.isfinite(met.pooled)


def test_a_malformed_act_is_refused_by_its_field():
    steer, local = {"op": "steer", "token": 3, "layer": 1}, {"op": "local"}
    refused(
        read_act,
        ({"stop": {}}, "stop.above", "missing"),
        ({"stop": {"above": 1, "below": 2}}, "stop.below", "give `above` or `below`"),
        ({"stop": {"above": float("nan")}}, "stop.above", "finite"),
        ({"stop": {"above": 1, "for": 0}}, "stop.for", "1 to 4096"),
        ({"stop": {"above": 1, "pool": "mean:0"}}, "stop.pool", "ema:0.9"),
        ({"stop": {"above": 1, "pool": "mean:5000"}}, "stop.pool", "at most 4096"),
        ({"stop": {"above": 1, "pool": "ema:1.0"}}, "stop.pool", "ema:0.9"),
        ({"stop": {"above": 1, "pools": "max"}}, "stop", "pools"),
        ({"halt": {"above": 1}}, "", "known: `stop`, `flag`, `switch`"),
        ({"stop": 2.0}, "stop", "expected a dict"),
        ("stop", "", "expected Stop"),
        ({"stop": {"edits": [], "above": 1}}, "stop", "edits"),
        ({"switch": {"above": 1}}, "switch", "edits"),
        ({"switch": {"edits": []}}, "switch.above", "missing"),
        ({"switch": {"edits": [{"op": "steer"}], "above": 1}}, "switch.edits[0].vector", "missing"),
        ({"switch": {"edits": [local], "above": 1}}, "switch.edits[0].op", "functions"),
        ({"switch": {"edits": [steer], "above": 1}}, "switch.edits[0].token", "cannot be switched"),
    )
    refused_calls(
        (lambda: Switch([STEER, Local(print, 1)], above=1), "edits[1]", "cannot be switched on"),
        (
            lambda: Probe([1.0], 0, positions=["prompt", "last_row"], act=Stop(above=1)),
            "known only when the request has ended",
        ),
    )
    assert Stop(above=1.0) != Flag(above=1.0)
