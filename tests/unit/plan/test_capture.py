import dataclasses
import json

import numpy as np
import pytest
from support.refusals import refused

from midstream.errors import SpecError
from midstream.plan import Capture, Layers, Plan, Positions, Sites

FULL = {"layers": [1, -1], "sites": ["resid_mid"], "positions": ["all", 3], "phase": "prompt"}


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


def test_where_its_rows_go_is_part_of_it():
    capture = Capture(0, sink="store", tag="probe-v1", request_id="r_1", metadata={"a": [1, None]})
    assert capture.place == ("store", "probe-v1", "r_1")
    for text in ("\U0001f600", "\\ud800", "ü"):
        assert Capture(0, metadata={"a": text}).metadata["a"] == text
    assert capture not in (Capture(0), dataclasses.replace(capture, sink="npz"))
    assert dataclasses.replace(capture, layers=1).metadata == capture.metadata
    assert Capture(0).place == ("memory", "", "")
    shown = Capture(0, stream=True)
    assert shown != Capture(0) == shown.without_place()
    assert Capture(0, stream=False).to_dict().keys() == {"layers", "sites", "positions", "phase"}


def test_where_its_files_are_laid_out_is_no_part_of_what_is_read():
    stored = Capture(0, sink="npz", tag="a", request_id="b", metadata={"c": 1}, layout="packed")
    assert stored.without_place() == Capture(0)
    assert Plan(captures=(stored,)).without_places() == Plan(captures=(Capture(0),))


def test_the_phase_is_shorthand_for_that_of_the_positions():
    inner = Positions([1, 2], "prompt")
    for positions, phase in ((inner, None), (inner, "prompt"), (Positions([1, 2]), "prompt")):
        assert Capture(0, positions=positions, phase=phase).positions == inner
    words = "contradicts the phase of the positions.*prompt"
    refused(
        lambda phase: Capture(0, positions=Positions("all", "prompt"), phase=phase),
        ("generated", "phase", words),
        ("all", "phase", words),
    )
    items = Positions(["all", "last_row"])
    refused(
        lambda phase: Capture(0, positions=items, phase=phase),
        ("prompt", "positions[1]", "'last_row' cannot select a token"),
    )


def test_a_malformed_field_is_refused_by_its_path():
    refused(
        lambda change: Capture.parse({**FULL, **change}),
        ({"layers": [0, "x"]}, "layers[1]", "expected `int`, got `str`"),
        ({"layers": None}, "", "missing field `layers`"),
        ({"positions": [0, 1.5]}, "positions[1]", "got `float`"),
        ({"positions": "generated"}, "positions", 'cannot select a token of phase "prompt"'),
        (
            {"phase": "decode"},
            "phase",
            "expected one of `all`, `prompt`, `generated`, got 'decode'",
        ),
        ({"exclude": ["nope"]}, "exclude[0]", "got 'nope'"),
        ({"layer": 3}, "layer", "`layers` is given too; give one of them"),
        ({"sink": ""}, "sink", "expected 1 to 128 of the characters A-Z"),
        ({"sink": None}, "sink", "expected `str`, got `None`"),
        ({"tag": "../up"}, "tag", "expected 1 to 128 of the characters A-Z.*got '../up'"),
        ({"stream": True, "sink": "store"}, "stream", "requires the sink \"memory\", got 'store'"),
        ({"metadata": {"a": "\ud800"}}, "metadata", "unpaired surrogate"),
        ({"metadata": {"a": json.loads("[" * 64 + "]" * 64)}}, "metadata", "more than 64 lists"),
        ({"metadata": {"a": ["\ud800"]}}, "metadata", "contains an unpaired surrogate"),
        ({"metadata": [1]}, "metadata", "expected a dict of JSON values, got `list`"),
    )


def test_what_is_no_capture_is_refused():
    refused(
        Capture.parse,
        ({}, "missing field `layers`"),
        *((value, "expected a `Capture`, or its dict, got") for value in ([], False, 3.5, [3.5])),
        ([3, 3], "layer 3 is listed twice"),
        ("resid_post", "missing field `layers`"),
    )


def test_heads_keep_their_order():
    capture = Capture([5], "z", heads=[7, 3])
    assert capture.heads == (7, 3)
    assert Capture([5], "z", heads=np.array([7, 3])) == capture
    assert Capture([5], "z", heads=3).heads == (3,)
    assert capture not in (Capture([5], "z"), Capture([5], "z", heads=[3]))
    assert dataclasses.replace(capture, heads=None) == Capture([5], "z")
    assert capture.without_place() is capture
    assert Capture(5, "z", heads=3, stream=True).without_place() == Capture(5, "z", heads=3)
    with pytest.raises(SpecError, match="memory"):
        dataclasses.replace(capture, sink="store")


def test_how_its_rows_return_is_kept_and_checked():
    assert dataclasses.replace(Capture(0, return_="sharded"), layers=1).return_ == "sharded"
    assert (Capture(0).return_, Capture(0).max_rows) == ("", None)
    limited = Capture([1], max_rows=5, sink="store")
    assert limited.without_place() == Capture([1], max_rows=5)
    refused(
        lambda given: Capture(0, "z", **given),
        ({"return_": "both"}, "return", "^return: expected one of gathered, sharded, got 'both'$"),
        ({"heads": []}, "heads", "expected 1 to"),
        ({"heads": -1}, "heads", "expected an index from 0 on, got -1"),
        ({"heads": [1, 1]}, "heads", "given twice"),
        ({"heads": True}, "heads", "expected an `int` or a list"),
        ({"heads": 1, "sink": "store"}, "heads", 'sink "memory", got .*store'),
        ({"max_rows": 0}, "max_rows", "at least 1"),
        ({"max_rows": True}, "max_rows", "expected"),
    )
