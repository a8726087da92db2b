from __future__ import annotations

import copy
import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec.strategies import json_values, plans, spoilt

from midstream.errors import SpecError
from midstream.spec import Capture, Plan, Steer

CAPTURE = {"layers": [0, 1]}
STEER = {"op": "steer", "vector": [1.0, 2.0], "layer": 1}


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
    plan = Plan.make(Capture(-1, positions=[slice(4), "last"]), Steer([1, 2], 1, phase="generated"))
    assert plan is not None
    assert plan.to_json() == (
        '{"capture":[{"layers":[-1],"sites":["resid_post"],'
        '"positions":[{"slice":[0,4,1]},"last"],"phase":"all"}],'
        '"edits":[{"op":"steer","vector":{"f32":"AACAPwAAAEA="},"layer":1,"scale":1.0,'
        '"site":"resid_post","positions":["all"],"phase":"generated"}]}'
    )


def test_one_value_is_a_list_of_one():
    assert Plan.parse({"capture": CAPTURE}) == Plan.parse({"capture": [CAPTURE]})
    assert Plan.parse({"edits": STEER}) == Plan.parse({"edits": [STEER]})
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
    with pytest.raises(SpecError, match=r"^capture\[2\]: the same as capture\[0\]$"):
        Plan.make([Capture(0), Capture(1), {"layers": [0], "sites": "post_block"}])


@pytest.mark.parametrize(
    ("value", "path", "problem"),
    [
        ({}, "", "asks for nothing: give `capture`, `edits` or both"),
        ({"capture": []}, "capture", "the list is empty"),
        ({"capture": CAPTURE, "edits": []}, "edits", "the list is empty"),
        ({"capture": None}, "capture", "expected a dict or a list, got `None`"),
        ({"captures": CAPTURE}, "", "unknown field 'captures' .did you mean `capture`"),
        ({"capture": CAPTURE, "x": 1}, "", "unknown field 'x'; known: `capture`, `edits`"),
        ({"capture": "all"}, "capture", "expected a dict of `layers`.*got `str`"),
        ({"capture": [CAPTURE, 3]}, "capture[1]", "expected a dict of `layers`.*got `int`"),
        ({"capture": {"layers": [True]}}, "capture.layers[0]", "expected `int`, got `bool`"),
        ({"capture": [{"layers": [0, None]}]}, "capture[0].layers[1]", "got `None`"),
        ({"capture": {"sites": "resid_post"}}, "capture", "missing field `layers`"),
        (
            {"edits": [{"vector": [1], "layer": 1}]},
            "edits[0]",
            "missing field `op`; known: `steer`",
        ),
        ({"edits": {"op": "clamp", "lo": 1}}, "edits.op", "expected one of `steer`, got 'clamp'"),
        ({"edits": [STEER, STEER, {**STEER, "layer": "3"}]}, "edits[2].layer", "got `str`"),
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
        ({"edits": [STEER] * 1025}, "edits", "at most 1024 can be listed, got 1025"),
        ({"capture": [3] * 1025}, "capture", "at most 1024 can be listed, got 1025"),
        ([CAPTURE], "", "expected a dict of `capture`, `edits`, got `list`"),
        (None, "", "expected a dict of `capture`, `edits`, got `None`"),
    ],
)
def test_a_malformed_plan_is_refused_by_the_path_of_what_is_wrong(value, path, problem):
    with pytest.raises(SpecError, match=problem) as caught:
        Plan.parse(value)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path}: " if path else "")
    with pytest.raises(SpecError, match=problem):
        Plan.parse(json.dumps(value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected JSON"),
        ("{", "expected JSON"),
        ("capture", "expected JSON"),
        ('{"capture": {"layers": [0]}} x', "expected JSON"),
        (b'\xff\xfe{"capture"', "expected JSON.*utf-8"),
        ('{"capture": {"layers": 0}, "capture": {"layers": 1}}', "'capture' twice in one object"),
        ('{"capture": {"layers": 0, "layers": 1}}', "'layers' twice in one object"),
        ('{"edits": {"op": "steer", "vector": [NaN], "layer": 0}}', "NaN is not a JSON number"),
        (
            '{"edits": {"op": "steer", "vector": [-Infinity], "layer": 0}}',
            "-Infinity is not a JSON",
        ),
        ('{"edits": {"op": "steer", "vector": [1e999], "layer": 0}}', "finite number, got inf"),
        ('{"capture": {"layers": ' + "9" * 5000 + "}}", "(expected JSON|within)"),
        ("[" * 100_000, "(nested too deeply|expected JSON)"),
    ],
)
def test_text_that_is_not_strict_json_is_refused(text, problem):
    with pytest.raises(SpecError, match=problem):
        Plan.parse(text)


def test_the_constructor_refuses_what_parsing_would_have_read():
    with pytest.raises(SpecError, match="capture: expected a tuple of `Capture`; see Plan.make"):
        Plan([Capture(0)])
    with pytest.raises(SpecError, match="edits: expected a tuple of `Steer`"):
        Plan((), (STEER,))
    with pytest.raises(SpecError, match="asks for nothing"):
        Plan()


def _reads_or_refuses(read, value):
    """What is read; None if it is refused, in a message that never grows with what was sent."""
    problem = ""
    try:
        return read(value)
    except SpecError as error:
        problem = str(error)
    assert len(problem) < 1000
    return None


@given(json_values | st.binary() | st.text())
def test_whatever_is_sent_is_read_or_refused(value):
    for read in (Plan.parse, Capture.parse, Steer.parse):
        _reads_or_refuses(read, value)


@given(st.data())
@settings(max_examples=150)
def test_a_plan_with_something_spoilt_is_read_or_refused(data):
    value = data.draw(spoilt(data.draw(plans).to_dict()))
    plan = _reads_or_refuses(Plan.parse, value)
    if plan is not None:
        assert Plan.parse(plan.to_json()) == plan
