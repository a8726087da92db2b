"""The field `midstream` of a body: read strictly, found in either place, taken out."""

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


STORED = {"layers": [1], "sink": "store"}
# (value of the field, place in it, problem)
WRONG_FIELDS = [
    (3, "", "expected a dict"),
    ([], "", "expected a dict"),
    (None, "", "expected a dict"),
    ({"captures": {}}, "", "did you mean `capture`"),
    ({"capture": None}, ".capture", "omit it instead"),
    ({"activations": "base64"}, ".activations", "expected one of handle, inline, none"),
    ({"activations": ["inline"]}, ".activations", "expected one of"),
    ({"capture": {"layers": ["x"]}}, ".capture.layers[0]", "expected"),
    ({"steer": {"vector": "/etc/passwd", "layer": 1}}, ".steer.vector", "with a dot or slash"),
    ({"steer": [{"vector": [1], "layer": 1}, {"vector": [1]}]}, ".steer[1].layer", "missing"),
    ({"edits": {"op": "feature", "sae": "/srv/sae", "index": 1, "layer": 1}}, ".edits.sae", "dot"),
    ({"capture": {**STORED, "tag": "../x"}}, ".capture.tag", "not starting with a dot"),
    ({"capture": {**STORED, "request_id": "a/b"}}, ".capture.request_id", "expected"),
    ({"capture": {**STORED, "sink": "../store"}}, ".capture.sink", "expected"),
    ({"controller": "os:getpid"}, ".controller", "expected 1 to 64 of the characters"),
    ({"controller": {"path": "os:getpid"}}, ".controller", "unknown field 'path'"),
    ({"controller": {"threshold": {"probe": "p"}}}, ".controller.threshold", "missing field"),
]
# (value of the field in vllm_xargs, problem)
WRONG_TEXTS = [
    ({"capture": CAPTURE}, "expected JSON as text"),
    ("{", "expected JSON"),
    ("[" * 100_000, "nested too deeply"),
    ('{"activations": "none", "activations": "inline"}', "duplicate JSON field"),
    ('{"steer": {"vector": [NaN], "layer": 1}}', "NaN is not a JSON number"),
]


def test_what_is_malformed_is_refused_with_its_place():
    cases = [({"midstream": value}, f"midstream{path}", said) for value, path, said in WRONG_FIELDS]
    xargs = [({"vllm_xargs": {"midstream": text}}, said) for text, said in WRONG_TEXTS]
    xargs.append(({"midstream": {}, "vllm_xargs": {"midstream": "{}"}}, "use only one"))
    for body, path, problem in cases + [(one, "vllm_xargs.midstream", said) for one, said in xargs]:
        with pytest.raises(SpecError, match=problem) as caught:
            take_field(body)
        assert caught.value.path.startswith(path), body


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
