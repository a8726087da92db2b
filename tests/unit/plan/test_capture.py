from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from support.refusals import refused

from midstream.errors import SpecError
from midstream.plan import Capture, Layers, Plan, Positions, Sites

FULL = {"layers": [1, -1], "sites": ["resid_mid"], "positions": ["all", 3], "phase": "prompt"}


def deep(lists):
    return json.loads("[" * lists + "]" * lists)


def test_a_capture_has_its_fields_in_canonical_form():
    capture = Capture([1, 2], sites="post_attn", positions=[0, -1], phase="prompt")
    assert capture.layers == Layers([1, 2])
    assert capture.sites == Sites("resid_mid")
    assert capture.positions == Positions([0, -1], "prompt")
    assert Capture("all") == Capture(["all"], ["resid_post"], "all", "all")


def test_a_dict_is_the_arguments_and_what_is_emitted_has_every_field():
    assert Capture.parse(FULL).to_dict() == FULL
    assert Capture.parse({"layers": 3}).to_dict() == {
        "layers": [3],
        "sites": ["resid_post"],
        "positions": ["all"],
        "phase": "all",
    }
    capture = Capture(0)
    assert Capture.parse(capture) is capture


def test_positions_can_be_left_out():
    capture = Capture(0, positions="prompt", exclude=[0, -1])
    assert capture.positions == Positions("prompt", exclude=[0, -1])
    assert capture.to_dict()["exclude"] == [0, -1]
    assert Capture.parse(capture.to_dict()) == capture
    with pytest.raises(SpecError, match="got 'nope'") as caught:
        Capture(0, exclude=["nope"])
    assert caught.value.path.startswith("exclude")


def test_where_its_rows_go_is_part_of_it_and_survives_json():
    capture = Capture(0, sink="store", tag="probe-v1", request_id="r_1", metadata={"a": [1, None]})
    assert capture.place == ("store", "probe-v1", "r_1")
    assert capture.metadata == {"a": [1, None]}
    for text in ("\U0001f600", "\\ud800", "ü"):
        assert Capture(0, metadata={"a": text}).metadata["a"] == text
    form = json.loads(json.dumps(capture.to_dict()))
    assert Capture.parse(form) == capture
    assert hash(Capture.parse(form)) == hash(capture)
    assert capture not in (Capture(0), dataclasses.replace(capture, sink="npz"))
    assert dataclasses.replace(capture, layers=1).metadata == capture.metadata
    assert Capture(0).place == ("memory", "", "")
    assert Capture(0).to_dict().keys() == {"layers", "sites", "positions", "phase"}


def test_that_its_rows_are_shown_on_the_way_survives_json_and_is_no_part_of_what_is_read():
    capture = Capture(0, stream=True)
    assert capture.to_dict()["stream"] is True
    assert Capture.parse(json.loads(json.dumps(capture.to_dict()))) == capture
    assert capture != Capture(0)
    assert capture.without_place() == Capture(0)
    assert "stream" not in Capture(0, stream=False).to_dict()


def test_where_its_files_are_laid_out_is_no_part_of_what_is_read():
    stored = Capture(0, sink="npz", tag="a", request_id="b", metadata={"c": 1}, layout="packed")
    assert stored.without_place() == Capture(0)
    assert Plan(captures=(stored,)).without_places() == Plan(captures=(Capture(0),))


def test_one_field_can_be_replaced():
    assert dataclasses.replace(Capture(0, phase="prompt"), layers=2) == Capture(2, phase="prompt")


def test_the_phase_is_shorthand_for_that_of_the_positions():
    inner = Positions([1, 2], "prompt")
    assert Capture(0, positions=inner).positions == inner
    assert Capture(0, positions=inner, phase="prompt").positions == inner
    assert Capture(0, positions=Positions([1, 2]), phase="prompt").positions == inner


@pytest.mark.parametrize("phase", ["generated", "all"])
def test_a_phase_that_contradicts_that_of_the_positions_is_refused(phase):
    with pytest.raises(
        SpecError, match=f'"{phase}" contradicts the phase of the positions.*"prompt"'
    ) as caught:
        Capture(0, positions=Positions("all", "prompt"), phase=phase)
    assert caught.value.path == "phase"


def test_a_malformed_field_is_refused_by_its_path():
    refused(
        lambda change: Capture.parse({**FULL, **change}),
        ({"layers": [0, "x"]}, "layers[1]", "expected `int`, got `str`"),
        ({"layers": None}, "", "missing field `layers`"),
        ({"sites": ["resid"]}, "sites[0]", "unknown site 'resid'"),
        ({"positions": [0, 1.5]}, "positions[1]", "got `float`"),
        ({"positions": None}, "positions", "got `None`"),
        ({"positions": "generated"}, "positions", 'cannot select a token of phase "prompt"'),
        (
            {"phase": "decode"},
            "phase",
            "expected one of `all`, `prompt`, `generated`, got 'decode'",
        ),
        (
            {"layer": 3},
            "layer",
            "`layers` is given too; give one of them",
        ),
        ({"sink": ""}, "sink", "expected 1 to 128 of the characters A-Z"),
        ({"sink": None}, "sink", "expected `str`, got `None`"),
        ({"tag": "../up"}, "tag", "expected 1 to 128 of the characters A-Z.*got '../up'"),
        ({"request_id": "a/b"}, "request_id", "got 'a/b'"),
        ({"stream": 1}, "stream", "expected `bool`, got `int`"),
        ({"stream": True, "sink": "store"}, "stream", "requires the sink \"memory\", got 'store'"),
        ({"metadata": {"a": "\ud800"}}, "metadata", "unpaired surrogate"),
        ({"metadata": {"a": {"\ud800": 1}}}, "metadata", "unpaired surrogate"),
        ({"metadata": {"a": deep(64)}}, "metadata", "more than 64 lists and dicts"),
        ({"metadata": {"a": ["\ud800"]}}, "metadata", "contains an unpaired surrogate"),
        ({"metadata": {"\udfff": 1}}, "metadata", "contains an unpaired surrogate"),
        ({"metadata": [1]}, "metadata", "expected a dict of JSON values, got `list`"),
    )


def test_a_contradiction_with_given_positions_names_the_item():
    with pytest.raises(SpecError, match="'last' cannot select a token") as caught:
        Capture(0, positions=Positions(["all", "last"]), phase="prompt")
    assert caught.value.path == "positions[1]"


def test_what_is_no_capture_is_refused():
    refused(
        Capture.parse,
        ({}, "missing field `layers`"),
        ([], "expected a `Capture`, or its dict, got `list`"),
        ("all", r"got `str`; for every token at every layer, write Capture\(layers=\"all\"\)"),
        (True, r"got `bool`; .*write Capture\(layers=\"all\"\)"),
        (3, r"got `int`; to capture layers, write Capture\(layers=\[3, 4\]\)"),
        ([3, 4], r"got `list`; to capture layers, write Capture\(layers=\[3, 4\]\)"),
        (None, "expected a `Capture`, or its dict, got `None`"),
    )


def test_by_which_ranks_its_rows_leave_survives_json():
    capture = Capture(0, return_="sharded")
    assert capture.return_ == "sharded"
    form = json.loads(json.dumps(capture.to_dict()))
    assert form["return"] == "sharded"
    assert Capture.parse(form) == capture
    assert dataclasses.replace(capture, layers=1).return_ == "sharded"
    assert Capture.parse({"layers": 0}).return_ == ""
    assert "return" not in Capture(0).to_dict()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("both", r"^return: expected one of gathered, sharded, got 'both'$"),
        (True, r"^return: expected `str`, got `bool`$"),
        (["sharded"], r"^return: expected `str`, got `list`$"),
    ],
)
def test_other_ways_to_leave_are_refused(value, message):
    with pytest.raises(SpecError, match=message):
        Capture(0, return_=value)
    with pytest.raises(SpecError, match=message):
        Capture.parse({"layers": 0, "return": value})


def test_heads_keep_their_order_and_survive_json():
    capture = Capture([5], "z", heads=[7, 3])
    assert capture.heads == (7, 3)
    assert capture.to_dict()["heads"] == [7, 3]
    assert Capture.parse(json.loads(json.dumps(capture.to_dict()))) == capture
    assert hash(Capture.parse(capture.to_dict())) == hash(capture)
    assert Capture([5], "z", heads=np.array([7, 3])) == capture
    assert Capture([5], "z", heads=3).heads == (3,)
    assert capture not in (Capture([5], "z"), Capture([5], "z", heads=[3]))
    assert dataclasses.replace(capture, layers=6) == Capture(6, "z", heads=[7, 3])
    assert dataclasses.replace(capture, heads=None) == Capture([5], "z")
    assert capture.without_place() is capture
    assert Capture(5, "z", heads=3, stream=True).without_place() == Capture(5, "z", heads=3)
    assert Capture(5, "z").heads is None
    assert "heads" not in Capture(5, "z").to_dict()


@pytest.mark.parametrize(
    ("heads", "problem"),
    [
        ([], "expected 1 to"),
        ((), "expected 1 to"),
        (-1, "expected an index from 0 on, got -1"),
        ([1, 1], "given twice"),
        ("all", "expected an `int` or a list"),
        (True, "expected an `int` or a list"),
        (1.5, "expected an `int` or a list"),
    ],
)
def test_malformed_heads_are_refused_at_their_field(heads, problem):
    with pytest.raises(SpecError, match=problem) as caught:
        Capture(0, "z", heads=heads)
    assert caught.value.path.startswith("heads")


def test_heads_are_chosen_for_memory_alone():
    with pytest.raises(SpecError, match='sink "memory", got .*store') as caught:
        Capture(0, "z", heads=1, sink="store")
    assert caught.value.path == "heads"
    with pytest.raises(SpecError, match="memory"):
        dataclasses.replace(Capture(0, "z", heads=1), sink="store")


def test_a_limit_of_rows_survives_json_and_is_at_least_one():
    capture = Capture([1], max_rows=5)
    assert (capture.to_dict()["max_rows"], Capture.parse(capture.to_dict())) == (5, capture)
    assert Capture([1]).max_rows is None
    assert Capture([1], max_rows=5, sink="store").without_place() == capture
    for wrong, problem in ((0, "at least 1"), (True, "expected"), (1.5, "expected")):
        with pytest.raises(SpecError, match=problem) as caught:
            Capture([1], max_rows=wrong)
        assert caught.value.path == "max_rows"
    with pytest.raises(SpecError, match="only every selected row") as caught:
        Capture([1], max_rows=5, reduce="norm")
    assert caught.value.path == "max_rows"
