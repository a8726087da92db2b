"""The field `midstream` of a body: read strictly, found in either place, taken out."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.plan.strategies import json_values, plans, reads_or_refuses

from midstream.errors import SpecError
from midstream.plan import Capture, Local, Plan, Steer
from midstream.server.request_field import RETURNS, read_field, take_field

CAPTURE = {"layers": [1]}


def test_wishes_are_a_plan_and_how_rows_come():
    found = read_field({"capture": CAPTURE, "activations": "inline"})
    assert found.plan == Plan((Capture([1]),))
    assert found.activations == "inline"
    assert read_field({}).plan is None
    assert read_field({"capture": CAPTURE}).activations == "handle"


def test_no_function_is_read_from_a_body():
    shown = Local(json.dumps, 1).to_dict()
    assert shown["fn"] == "json:dumps"
    steer = {"op": "steer", "vector": [1.0], "layer": 1}
    for field, path in (
        ({"edits": shown}, "edits"),
        ({"edits": [steer, shown]}, r"edits\[1\]"),
        ({"edits": {"op": "gate", "edit": shown, "probe": [1.0]}}, "edits.edit"),
        ({"steer": {"fn": "json:dumps", "layer": 1}}, "steer"),
        ({"edits": {"op": "local", "fn": "os:getpid", "layer": 1}}, "edits"),
    ):
        with pytest.raises(SpecError, match=path):
            read_field(field)


def test_steer_needs_no_op_and_goes_before_the_edits():
    steer = {"vector": [1.0], "layer": 1}
    found = read_field({"steer": steer, "edits": [{"op": "scale", "factor": 2, "layer": 2}]})
    assert [edit.op for edit in found.plan.edits] == ["steer", "scale"]
    assert found.plan.edits[0] == Steer([1.0], 1)


@settings(max_examples=15)  # plans take long to make
@given(plans, st.sampled_from(RETURNS))
def test_whatever_a_plan_says_arrives_in_both_places(plan, returned):
    asked = {**plan.to_dict(), "activations": returned}
    text = json.dumps(asked)
    bodies = [
        {"prompt": "x", "midstream": json.loads(text)},
        {"prompt": "x", "vllm_xargs": {"midstream": text, "other": 1}},
    ]
    for body in bodies:
        found = take_field(body)
        assert found.plan == plan
        assert found.activations == returned
    assert bodies == [{"prompt": "x"}, {"prompt": "x", "vllm_xargs": {"other": 1}}]


WRONG = {
    "no object": ({"midstream": 3}, "midstream", "expected a dict"),
    "a list": ({"midstream": []}, "midstream", "expected a dict"),
    "null": ({"midstream": None}, "midstream", "expected a dict"),
    "an unknown field": ({"midstream": {"captures": {}}}, "midstream", "did you mean `capture`"),
    "a null within": ({"midstream": {"capture": None}}, "midstream.capture", "omit it instead"),
    "an unknown form": (
        {"midstream": {"activations": "base64"}},
        "midstream.activations",
        "expected one of handle, inline, none",
    ),
    "a form that cannot be compared": (
        {"midstream": {"activations": ["inline"]}},
        "midstream.activations",
        "expected one of",
    ),
    "a bad layer": (
        {"midstream": {"capture": {"layers": ["x"]}}},
        "midstream.capture.layers[0]",
        "expected",
    ),
    "both places": (
        {"midstream": {}, "vllm_xargs": {"midstream": "{}"}},
        "vllm_xargs.midstream",
        "use only one",
    ),
    "no text in xargs": (
        {"vllm_xargs": {"midstream": {"capture": CAPTURE}}},
        "vllm_xargs.midstream",
        "expected JSON as text",
    ),
    "bad text in xargs": (
        {"vllm_xargs": {"midstream": "{"}},
        "vllm_xargs.midstream",
        "expected JSON",
    ),
    "deep text in xargs": (
        {"vllm_xargs": {"midstream": "[" * 100_000}},
        "vllm_xargs.midstream",
        "nested too deeply",
    ),
    "a field twice in xargs": (
        {"vllm_xargs": {"midstream": '{"activations": "none", "activations": "inline"}'}},
        "vllm_xargs.midstream",
        "duplicate JSON field",
    ),
    "NaN in xargs": (
        {"vllm_xargs": {"midstream": '{"steer": {"vector": [NaN], "layer": 1}}'}},
        "vllm_xargs.midstream",
        "NaN is not a JSON number",
    ),
    "a path as vectors": (
        {"midstream": {"steer": {"vector": "/etc/passwd", "layer": 1}}},
        "midstream.steer.vector",
        "not starting with a dot or slash",
    ),
    "a second steer": (
        {"midstream": {"steer": [{"vector": [1], "layer": 1}, {"vector": [1]}]}},
        "midstream.steer[1].layer",
        "missing",
    ),
    "a path as an SAE": (
        {"midstream": {"edits": [{"op": "feature", "sae": "/srv/sae", "index": 1, "layer": 1}]}},
        "midstream.edits[0].sae",
        "not starting with a dot or hyphen",
    ),
    "a tag that leaves its folder": (
        {"midstream": {"capture": {"layers": [1], "sink": "store", "tag": "../x"}}},
        "midstream.capture.tag",
        "not starting with a dot",
    ),
    "an id that leaves its folder": (
        {"midstream": {"capture": {"layers": [1], "sink": "store", "request_id": "a/b"}}},
        "midstream.capture.request_id",
        "expected",
    ),
    "a function as a controller": (
        {"midstream": {"controller": "os:getpid"}},
        "midstream.controller",
        "expected 1 to 64 of the characters",
    ),
    "a path as a controller": (
        {"midstream": {"controller": {"path": "os:getpid"}}},
        "midstream.controller",
        "unknown field 'path'",
    ),
    "a controller without a field": (
        {"midstream": {"controller": {"threshold": {"probe": "p"}}}},
        "midstream.controller.threshold",
        "missing field",
    ),
    "a sink that leaves its folder": (
        {"midstream": {"capture": {"layers": [1], "sink": "../store"}}},
        "midstream.capture.sink",
        "expected",
    ),
}


@pytest.mark.parametrize(("body", "path", "problem"), WRONG.values(), ids=WRONG)
def test_what_is_malformed_is_refused_with_its_place(body, path, problem):
    with pytest.raises(SpecError, match=problem) as caught:
        take_field(body)
    assert caught.value.path.startswith(path)


FIELDS = st.sampled_from(["capture", "edits", "steer", "probes", "activations"])


@given(st.dictionaries(FIELDS, json_values))
def test_any_value_is_read_or_refused(value):
    reads_or_refuses(read_field, value)


def test_the_same_field_is_parsed_once_and_another_one_is_itself():
    def taken(layer):
        return take_field({"prompt": "x", "midstream": {"capture": {"layers": [layer]}}})

    assert taken(1) is taken(1)
    assert taken(1).plan == Plan((Capture([1]),))
    assert taken(2).plan == Plan((Capture([2]),))
    for stream in (True, False):
        found = take_field({"midstream": {"capture": {**CAPTURE, "stream": stream}}})
        assert found.plan.captures[0].stream is stream


def test_a_malformed_field_is_refused_each_time():
    for _ in range(2):
        with pytest.raises(SpecError, match="midstream"):
            take_field({"midstream": {"capture": {"layerss": [1]}}})


def test_a_number_is_no_word_though_their_json_differs_little():
    assert take_field({"midstream": {"capture": {"layers": [1]}}}) is not None
    for value in (True, "1", 1.5):
        with pytest.raises(SpecError):
            take_field({"midstream": {"capture": {"layers": [value]}}})
