"""Logs of evaluations have no tensors, and nothing that was asked for is left out silently."""

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.errors import SpecError
from midstream.lab.harness.logged import MOST, joined_field, logged_results

EDIT = {"op": "steer", "vector": {"name": "happy"}, "layer": 1}
GATE = {"op": "gate", "probe": {"direction": [1.0, 2.0], "layer": 1, "name": "g"}, "edit": EDIT}
ROOT = Path(__file__).resolve().parents[3]


def test_arguments_of_a_call_replace_those_of_the_model_one_by_one():
    other = {**EDIT, "scale": 3.0}
    field = joined_field({"edits": [EDIT], "capture": {"layers": [1]}}, {"edits": [other]})
    assert field is not None
    assert [edit["scale"] for edit in field["edits"]] == [3.0]
    assert field["capture"][0]["layers"] == [1]
    assert field["activations"] == "handle"
    assert joined_field({}, None) is None
    assert joined_field({"edits": None}, {}) is None


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        ({"edits": [{**EDIT, "vector": [0.5] * 4}]}, None, "midstream"),
        ({}, {"edits": [GATE]}, "midstream"),
        ({}, {"probes": [{"direction": [1.0], "layer": 1, "name": "p"}]}, "midstream"),
        ({"edits": [{"op": "replace", "rows": [[1.0, 2.0]], "layer": 1, "positions": [0]}]}, None,
         "midstream"),
        ({"activations": "inline"}, {"capture": {"layers": [1]}}, "midstream.activations"),
        ({}, {"captur": {"layers": [1]}}, "midstream"),
        ({}, "all", "midstream"),
        ({"edits": [{**EDIT, "layer": "first"}]}, None, "midstream"),
    ],
)  # fmt: skip
def test_numbers_and_mistakes_are_rejected_before_anything_is_sent(first, second, path):
    with pytest.raises(SpecError) as caught:
        joined_field(first, second)
    assert caught.value.path.startswith(path)


LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3 * MOST)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["lens", "attention", "activations"]), VALUES))
def test_no_long_text_of_any_result_is_logged_and_short_ones_are_unchanged(field):
    found = logged_results({"midstream": field, "choices": []})
    texts = json.dumps(found)

    def leaves(value):
        if isinstance(value, dict):
            for one in value.values():
                yield from leaves(one)
        elif isinstance(value, list):
            for one in value:
                yield from leaves(one)
        else:
            yield value

    for leaf in leaves(field):
        if isinstance(leaf, str) and len(leaf) > MOST:
            assert json.dumps(leaf) not in texts
            assert f"<{len(leaf)} characters omitted>" in texts
    if all(len(leaf) <= MOST for leaf in leaves(field) if isinstance(leaf, str)):
        assert found == field


def test_scores_and_receipts_are_complete_and_several_choices_are_a_list():
    scores = {"mood": {"scores": [0.5] * 5000}}
    one = {"receipt": {"status": "ok"}, "probes": scores, "attention": [{"base64": "A" * 5000}]}
    found = logged_results({"choices": [{"midstream": one}, {"index": 1}]})
    assert found[0]["probes"] == scores
    assert found[0]["receipt"] == {"status": "ok"}
    assert found[0]["attention"] == [{"base64": "<5000 characters omitted>"}]
    assert found[1] is None
    assert logged_results({"choices": [{"index": 0}]}) is None
    assert logged_results({"midstream": {"lens": [0] * 2000}})["lens"] == "<2000 values omitted>"


def test_the_package_names_its_provider_to_inspect():
    (entry,) = entry_points(group="inspect_ai", name="midstream")
    assert entry.value == "midstream.lab.harness.inspect_entry"
