from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused
from unit.plan.strategies import json_values, plans, reads_or_refuses, spoilt

from midstream.errors import SpecError
from midstream.plan import Capture, Gate, Plan, Probe, Scale, Steer
from midstream.plan.operations import KINDS_BY_OP
from midstream.plan.positions.items import TokenIds

CAPTURE = {"layers": [0, 1]}
STEER = {"op": "steer", "vector": [1.0, 2.0], "layer": 1}
PROBE = {"direction": [1.0, 2.0], "layer": 1}
NOTHING = r"the plan is empty: give `capture`, `edits` or `probes`, or `edits=\[\]` to update"
OPS = ", ".join(f"`{op}`" for op in KINDS_BY_OP)


@given(plans)
def test_a_plan_survives_its_dict_and_its_text(plan):
    assert Plan.parse(plan.to_dict()) == plan
    assert Plan.parse(plan.to_json()) == plan
    assert Plan.parse(plan.to_json().encode()) == plan
    assert Plan.parse(plan.to_json()).to_json() == plan.to_json()
    assert hash(Plan.parse(plan.to_json())) == hash(plan)


@given(plans)
@settings(max_examples=20)
def test_a_plan_survives_copying_and_pickling(plan):
    assert copy.deepcopy(plan) == pickle.loads(pickle.dumps(plan)) == plan


def test_the_text_of_a_plan_is_what_it_was():
    plan = Plan.make(
        Capture(-1, positions=[slice(4), "last"]),
        Steer([1, 2], 1, phase="generated"),
        Probe([1, 2], 1),
    )
    assert plan is not None
    assert plan.to_json() == (
        '{"capture":[{"layers":[-1],"sites":["resid_post"],'
        '"positions":[{"slice":[0,4,1]},"last"],"phase":"all"}],'
        '"edits":[{"op":"steer","vector":{"f32":"AACAPwAAAEA="},"scale":1.0,"norm":null,'
        '"layer":1,"site":"resid_post","positions":["all"],"phase":"generated"}],'
        '"probes":[{"direction":{"f32":"AACAPwAAAEA="},"bias":0.0,"name":"probe","layer":1,'
        '"site":"resid_post","positions":["all"],"phase":"all"}]}'
    )


def test_one_value_is_a_list_of_one():
    assert Plan.parse({"capture": CAPTURE}) == Plan.parse({"capture": [CAPTURE]})
    assert Plan.parse({"edits": STEER}) == Plan.parse({"edits": [STEER]})
    assert Plan.parse({"probes": PROBE}) == Plan.parse({"probes": [PROBE]})
    assert Plan.make(Capture([0, 1]), Steer([1, 2], 1)) == Plan.parse(
        {"capture": CAPTURE, "edits": STEER}
    )


def test_values_and_dicts_can_be_mixed():
    assert Plan.make([CAPTURE, Capture(5)], (Steer([3], 0), STEER)) == Plan(
        (Capture([0, 1]), Capture(5)), (Steer([3], 0), Steer([1, 2], 1))
    )


def test_nothing_asked_makes_no_plan():
    assert Plan.make() is None
    assert Plan.make(None, None) is None


def test_a_plan_is_read_as_itself():
    plan = Plan((Capture(0),))
    assert Plan.parse(plan) is plan


def test_equal_edits_are_kept_as_they_add_up():
    assert len(Plan.parse({"edits": [STEER, STEER]}).edits) == 2


def test_overlapping_captures_are_allowed_but_not_equal_ones():
    assert len(Plan.parse({"capture": [CAPTURE, {"layers": [0]}]}).captures) == 2
    with pytest.raises(SpecError, match=r"^capture\[2\]: duplicate of capture\[0\]$"):
        Plan.make([Capture(0), Capture(1), {"layers": [0], "sites": "post_block"}])


def test_each_probe_has_a_name_of_its_own():
    with pytest.raises(
        SpecError, match="`probe` is already the name of probes.0.; use another"
    ) as caught:
        Plan.make(probes=[Probe([1], 0), Probe([1], 0, name="b"), Probe([2], 1)])
    assert caught.value.path == "probes[2].name"
    assert len(Plan.make(probes=[Probe([1], 0), Probe([1], 0, name="b")]).probes) == 2


def test_edits_of_every_kind_keep_their_order():
    edits = (Scale(2, 0), Steer([1], 0), Gate(Scale(3, 0), [1]), Scale(2, 0))
    assert Plan.make(edits=edits).edits == edits
    assert Plan.parse(Plan.make(edits=edits).to_json()).edits == edits


@pytest.mark.parametrize("part", ["capture", "edits", "probes"])
def test_a_plan_tells_whether_it_needs_the_prompts_tokens(part):
    form = {"capture": CAPTURE, "edits": STEER, "probes": PROBE}[part]
    assert not Plan.parse({part: form}).needs_prompt
    assert Plan.parse({part: {**form, "positions": TokenIds([3])}}).needs_prompt


def test_a_malformed_plan_is_refused_by_the_path_of_what_is_wrong():
    for value, path, problem in (
        ({}, "", NOTHING),
        ({"capture": []}, "capture", "the list is empty"),
        ({"capture": None}, "capture", "expected a dict or a list, got `None`"),
        ({"captures": CAPTURE}, "", "unknown field 'captures' .did you mean `capture`"),
        ({"capture": CAPTURE, "x": 1}, "", "field 'x'; known: `capture`, `edits`, `probes`"),
        ({"capture": "all"}, "capture", "expected a `Capture`, or its dict, got `str`"),
        ({"capture": [CAPTURE, 3]}, "capture[1]", "expected a `Capture`, or its dict, got `int`"),
        ({"capture": {"layers": [True]}}, "capture.layers[0]", "expected `int`, got `bool`"),
        ({"capture": [{"layers": [0, None]}]}, "capture[0].layers[1]", "got `None`"),
        ({"capture": {"sites": "resid_post"}}, "capture", "missing field `layers`"),
        ({"edits": [{"vector": [1], "layer": 1}]}, "edits[0]", f"missing field `op`; known: {OPS}"),
        ({"edits": {"op": "clam", "lo": 1}}, "edits.op", "one of `steer`.*got 'clam' .*`clamp`"),
        ({"edits": [STEER, 3]}, "edits[1]", "expected an edit, or a dict with `op`, got `int`"),
        ({"edits": {"op": "gate", "edit": STEER}}, "edits", "missing field `probe`"),
        (
            {"edits": {"op": "gate", "edit": {**STEER, "layer": "x"}, "probe": [1]}},
            "edits.edit.layer",
            "got 'x'",
        ),
        ({"probes": []}, "probes", "the list is empty"),
        ({"probes": [PROBE, {**PROBE, "layer": "x"}]}, "probes[1].layer", "got 'x'"),
        ({"probes": "all"}, "probes", r"expected Probe\(.*\), or its dict, got `str`"),
        ({"edits": [STEER, STEER, {**STEER, "layer": "3"}]}, "edits[2].layer", "got '3'"),
        (
            {"edits": [STEER, STEER, {**STEER, "positions": [0, "end"]}]},
            "edits[2].positions[1]",
            "got 'end'",
        ),
        (
            {"edits": {**STEER, "positions": {"slice": [0, 5, 0]}}},
            "edits.positions.slice[2]",
            "at least 1",
        ),
        ({"edits": [STEER] * 1025}, "edits", "expected at most 1024, got 1025"),
        ({"capture": [3] * 1025}, "capture", "expected at most 1024, got 1025"),
        ({"probes": [PROBE] * 1025}, "probes", "expected at most 1024, got 1025"),
        (
            [CAPTURE],
            "",
            "expected a dict of `capture`, `edits`, `probes`, `controller`, got `list`",
        ),
        (None, "", "expected a dict of `capture`, `edits`, `probes`, `controller`, got `None`"),
    ):
        with pytest.raises(SpecError, match=problem) as caught:
            Plan.parse(value)
        assert caught.value.path == path, value
        assert str(caught.value).startswith(f"{path}: " if path else "")
        with pytest.raises(SpecError, match=problem):
            Plan.parse(json.dumps(value))


def test_text_that_is_not_strict_json_is_refused():
    refused(
        Plan.parse,
        ("", "expected JSON"),
        ("{", "expected JSON"),
        ("capture", "expected JSON"),
        ('{"capture": {"layers": [0]}} x', "expected JSON"),
        (b'\xff\xfe{"capture"', "expected JSON.*utf-8"),
        (
            '{"capture": {"layers": 0}, "capture": {"layers": 1}}',
            "duplicate JSON field 'capture' in one object",
        ),
        ('{"capture": {"layers": 0, "layers": 1}}', "duplicate JSON field 'layers' in one object"),
        ('{"edits": {"op": "steer", "vector": [NaN], "layer": 0}}', "NaN is not a JSON number"),
        (
            '{"edits": {"op": "steer", "vector": [-Infinity], "layer": 0}}',
            "-Infinity is not a JSON",
        ),
        ('{"edits": {"op": "steer", "vector": [1e999], "layer": 0}}', "finite number, got inf"),
        ('{"capture": {"layers": ' + "9" * 5000 + "}}", "(expected JSON|within)"),
        ("[" * 100_000, "(nested too deeply|expected JSON)"),
    )


def test_the_constructor_refuses_what_parsing_would_have_read():
    with pytest.raises(SpecError, match="capture: expected a tuple of `Capture`; see Plan.make"):
        Plan([Capture(0)])
    with pytest.raises(SpecError, match="edits: expected a tuple of edits; see Plan.make"):
        Plan((), (STEER,))


def test_a_plan_without_edits_yet_is_another_than_none():
    assert Plan.make() is None
    for edits in ([], ()):
        assert Plan.make(edits=edits) == Plan() == Plan.parse(Plan().to_json())
    assert Plan().to_dict() == {"edits": []}
    assert Plan.make(probes=PROBE, edits=[]) == Plan.make(probes=PROBE)


@given(json_values | st.binary() | st.text())
def test_whatever_is_sent_is_read_or_refused(value):
    for read in (Plan.parse, Capture.parse, Probe.parse):
        reads_or_refuses(read, value)
    for kind in KINDS_BY_OP.values():
        reads_or_refuses(kind.parse, value)


@given(st.data())
@settings(max_examples=100)
def test_a_plan_with_something_spoilt_is_read_or_refused(data):
    value = data.draw(spoilt(data.draw(plans).to_dict()))
    plan = reads_or_refuses(Plan.parse, value)
    if plan is not None:
        assert Plan.parse(plan.to_json()) == plan
