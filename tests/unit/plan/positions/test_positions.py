from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from support.refusals import refused
from unit.plan.position_strategies import (
    PHASES,
    capture_positions,
    prompt_of,
    rows_of_item,
    spans,
    windows,
)

from midstream.errors import SpecError
from midstream.plan.positions.items import Role, Span, Text, TokenIds, Window
from midstream.plan.positions.positions import Positions


@pytest.mark.parametrize(
    ("value", "include"),
    [
        ("all", ("all",)),
        (["prompt", "last"], ("prompt", "last")),
        (3, (3,)),
        (np.int64(-1), (-1,)),
        ((1, 2), (1, 2)),
        (slice(5), (Span(0, 5),)),
        (slice(None), (Span(),)),
        (slice(-4, None), (Span(-4),)),
        (slice(np.int32(1), 9, 2), (Span(1, 9, 2),)),
        (range(2, 8, 3), (Span(2, 8, 3),)),
        (range(-4, -1), (Span(-4, -1),)),
        ({"slice": [2]}, (Span(2),)),
        ({"slice": [None, 4]}, (Span(0, 4),)),
        ({"slice": [1, None, None]}, (Span(1),)),
        ({"slice": (1, 9, 2)}, (Span(1, 9, 2),)),
        (
            [0, "last_prompt", slice(4, 6), {"slice": [8, 9]}],
            (0, "last_prompt", Span(4, 6), Span(8, 9)),
        ),
        (Window(-5, 0), (Window(-5, 0),)),
        ({"window": [-5, 0]}, (Window(-5, 0),)),
        ({"window": (0, None, 2)}, (Window(0, None, 2),)),
        ({"tokens": 7}, (TokenIds(7),)),
        ({"tokens": [7, 5]}, (TokenIds([5, 7]),)),
        ({"text": "Paris"}, (Text("Paris"),)),
        ({"text": "Paris", "occurrence": -1}, (Text("Paris", -1),)),
        ([{"role": "user"}, Role("user", 0)], (Role("user", -1), Role("user", 0))),
        ({"role": "tool", "message": "all"}, (Role("tool", "all"),)),
    ],
)
def test_positions_are_read_from_one_item_or_a_list(value, include):
    found = Positions.parse(value)
    assert found == Positions(value)
    assert (found.include, found.phase) == (include, "all")
    assert all(type(item) is not np.int64 for item in found.include)
    assert found.exclude == ()
    assert hash(found) == hash(Positions(list(include)))


def test_positions_of_positions_are_the_same():
    positions = Positions("all", phase="prompt")
    assert Positions.parse(positions) is positions


@given(capture_positions)
def test_what_is_emitted_is_read_back(positions):
    emitted = json.loads(json.dumps(positions.to_dict()))
    assert emitted["positions"] == positions.emit()
    assert emitted.get("exclude", []) == positions.emit_exclude()
    assert ("exclude" in emitted) == bool(positions.exclude)
    again = Positions.within(emitted["positions"], emitted["phase"], emitted.get("exclude"))
    assert again == positions == Positions(list(positions.include), again.phase, again.exclude)
    assert hash(again) == hash(positions)
    assert pickle.loads(pickle.dumps(positions)) == copy.deepcopy(positions) == positions


def test_a_range_of_negative_ints_selects_just_these():
    # Ints are counted from the prompt's end, so are a span's bounds; they agree below −1 only.
    assert Positions(range(-4, -1)).include == (Span(-4, -1),)
    for mixed in (range(-3, 0), range(-2, 2)):
        with pytest.raises(SpecError, match="counts from the prompt's end and from its start"):
            Positions(mixed)


def test_what_selects_nothing_or_is_malformed_is_refused():
    refused(
        Positions,
        ([], "", "at least one position"),
        ("last_promt", "", "expected one of `all`.*got 'last_promt' .did you mean `last_prompt`"),
        (
            ["all", "first"],
            "[1]",
            "`all`, `prompt`, `generated`, `last_prompt`, `last`, got 'first'",
        ),
        (True, "", "got `bool`"),
        ([0, False], "[1]", "got `bool`"),
        (1.0, "", "got `float`"),
        (None, "", "got `None`"),
        ([[1]], "[0]", "got `list`"),
        ({1, 2}, "", "got `set`"),
        (2**31 + 1, "", r"within ±2\*\*31"),
        ([5, 6, 5], "[2]", "5 is listed twice"),
        (["all", "all"], "[1]", "'all' is listed twice"),
        ([slice(5), range(5)], "[1]", "0:5 is listed twice"),
        (slice(5, 5), "", "the span 5:5 is empty"),
        (slice(7, 3), "", "the span 7:3 is empty"),
        (slice(-1, -3), "", "the span -1:-3 is empty"),
        (slice(-3, 0), "", "the span -3:0 is empty"),
        (slice(0, 0), "", "the span 0:0 is empty"),
        (slice(0, 9, 0), "step", "at least 1, got 0"),
        (slice(9, 0, -1), "step", "at least 1, got -1"),
        (slice(1.5, 3), "start", "expected `int`, got `float`"),
        (slice(1, True), "stop", "expected `int`, got `bool`"),
        (range(0), "", r"range\(0, 0, 1\) is empty"),
        (range(0, -2), "", r"range\(0, -2, 1\) is empty"),
        (range(9, 0, -1), "step", "at least 1, got -1"),
        (range(10**40), "stop", r"within ±2\*\*31, got an integer of 133 bits"),
        ({"slice": []}, "slice", "expected 1 to 3 numbers"),
        ({"slice": [1, 2, 3, 4]}, "slice", "expected 1 to 3 numbers, start, stop, step, got 4"),
        ({"slice": 3}, "slice", r"expected \[start, stop, step\], got `int`"),
        ({"slice": [5, 5]}, "slice", "the span 5:5 is empty"),
        ({"slice": [0, "9"]}, "slice[1]", "expected `int`, got `str`"),
        ({"slice": [False]}, "slice[0]", "expected `int`, got `bool`"),
        ([0, {"slice": [0, 9, 0]}], "[1].slice[2]", "at least 1, got 0"),
        (
            {"windw": [0, 9]},
            "",
            "one of `slice`, `window`.*got field 'windw' .did you mean `window`",
        ),
        (
            {},
            "",
            "expected a dict of one of `slice`, `window`, `tokens`, `text`, `role`, `image`, "
            "`audio`, `video`, got an empty one",
        ),
        ({"text": "a", "slice": [0]}, "", "unknown field 'text'; known: `slice`"),
        ({"window": [0]}, "window", "expected 2 to 3 numbers, start, stop, step, got 1"),
        ({"window": [3, 3]}, "window", r"Window\(3, 3\) is empty"),
        ({"window": [0, 3.0]}, "window[1]", "expected `int`, got `float`"),
        ({"window": [0, 3, 0]}, "window[2]", "at least 1, got 0"),
        ([0, {"tokens": [5, 5]}], "[1].tokens[1]", "token id 5 is listed twice"),
        ({"tokens": [5], "occurrence": 0}, "", "unknown field 'occurrence'; known: `tokens`"),
        ({"text": 5}, "text", "expected `str`, got `int`"),
        ({"text": "a", "occurrence": "last"}, "occurrence", "`int` or \"all\", got 'last'"),
        ({"role": "user", "occurrence": 0}, "", "unknown field 'occurrence'; known: `role`, `mess"),
        ([TokenIds(5), {"tokens": 5}], "[1]", r"TokenIds\(5\) is listed twice"),
        (
            [TokenIds(list(range(4096))), 3, TokenIds(9999)],
            "[2]",
            "expected at most 4096 token ids in total",
        ),
        ({1: 2}, "", "field names must be `str`, got `int`"),
        (list(range(4097)), "", "expected at most 4096 items, got 4097; use slices"),
    )


@pytest.mark.parametrize(
    ("item", "phase"),
    [
        ("generated", "prompt"),
        ("last", "prompt"),
        ("prompt", "generated"),
        ("last_prompt", "generated"),
        (-1, "generated"),
        (0, "generated"),
        (slice(None, -1), "generated"),
        (slice(0, 1), "generated"),
        (slice(0, 5, 7), "generated"),
        (Window(0, 5), "prompt"),
        (Window(-5, 0), "generated"),
        (Text("Paris"), "generated"),
        (Role("user"), "generated"),
    ],
)
def test_an_item_that_has_no_token_of_the_phase_is_refused(item, phase):
    with pytest.raises(SpecError, match=f'cannot select a token of phase "{phase}"') as caught:
        Positions(["all", item], phase)
    assert caught.value.path == "[1]"
    if item != "last":
        with pytest.raises(SpecError, match="cannot select a token of phase") as caught:
            Positions("all", phase, [99, item])
        assert caught.value.path == "exclude[1]"


@given(spans(bound=4) | windows(bound=4))
def test_a_span_is_refused_for_a_phase_just_when_no_prompt_gives_it_a_token(span):
    for phase in PHASES[1:]:
        possible = any(
            (row < prompt_len) == (phase == "prompt")
            for prompt_len in range(1, 12)
            for row in rows_of_item(span, prompt_of([0] * prompt_len), [0] * (prompt_len + 20))
        )
        try:
            Positions(span, phase)
        except SpecError:
            assert not possible
        else:
            assert possible


@pytest.mark.parametrize("phase", ["decode", 1, None, ["prompt"]])
def test_an_unknown_phase_is_refused(phase):
    with pytest.raises(SpecError, match="expected one of `all`, `prompt`, `generated`") as caught:
        Positions("all", phase)
    assert caught.value.path == "phase"


def test_what_is_left_out_is_read_as_strictly():
    refused(
        lambda exclude: Positions("all", exclude=exclude),
        ("all", "exclude", "expected one of `prompt`, `generated`, `last_prompt`, got 'all'"),
        (["prompt", "last"], "exclude[1]", "expected one of `prompt`.*got 'last'"),
        ([3, 3], "exclude[1]", "3 is listed twice"),
        (slice(5, 5), "exclude", "the span 5:5 is empty"),
        ({"tokens": [-1]}, "exclude.tokens[0]", "0 to 2"),
        (None, "exclude", "got `None`"),
        (list(range(4097)), "exclude", "at most 4096 items"),
    )


def test_what_is_left_out_may_be_one_item_a_list_or_nothing():
    assert Positions("all", exclude=3).exclude == (3,)
    assert Positions("all", exclude=[{"tokens": 3}, "prompt"]).exclude == (TokenIds(3), "prompt")
    assert Positions("all", exclude=[]) == Positions("all") != Positions("all", exclude=3)


def test_the_final_row_cannot_be_selected_where_something_is_left_out():
    with pytest.raises(SpecError, match="use a separate capture or probe") as caught:
        Positions(["all", "last"], exclude=3)
    assert caught.value.path == "exclude"


def test_fields_beside_each_other_are_named_in_errors():
    for value, phase, exclude, path in [
        ([0, "x"], None, None, "positions[1]"),
        ({"slice": [0, "9"]}, "all", None, "positions.slice[1]"),
        ("all", "x", None, "phase"),
        (Positions("all", "prompt"), "generated", None, "phase"),
        ("all", None, [0, "x"], "exclude[1]"),
        (Positions("all", exclude=3), None, 4, "exclude"),
        (Positions([0, "generated"]), "prompt", None, "positions[1]"),
    ]:
        with pytest.raises(SpecError) as caught:
            Positions.within(value, phase, exclude)
        assert caught.value.path == path


def test_fields_beside_positions_narrow_them():
    whole = Positions("all", exclude=3)
    assert Positions.within(whole, None) is whole
    assert Positions.within(whole, "prompt") == Positions("all", "prompt", 3)
    assert Positions.within(Positions("all", "prompt"), None, 3) == Positions("all", "prompt", 3)
    assert Positions.within(whole, None, [3]) == whole
    assert Positions.within([0, 1], None, []) == Positions([0, 1])


@pytest.mark.parametrize(
    ("positions", "needed"),
    [
        (Positions("all"), False),
        (Positions([0, -1, slice(2, 3), Window(-5, 0), "last"]), False),
        (Positions(TokenIds(3)), True),
        (Positions(TokenIds(3), "generated"), False),
        (Positions("all", exclude=TokenIds(3)), True),
        (Positions("all", "generated", exclude=TokenIds(3)), False),
        (Positions([0, Text("a")]), True),
        (Positions("all", exclude=Role("user")), True),
    ],
)
def test_positions_know_whether_they_need_more_than_the_prompts_length(positions, needed):
    assert positions.needs_prompt is needed


def test_items_are_where_single_or_listed():
    positions = Positions([0, 1], exclude=2)
    assert positions.path(1) == "positions[1]"
    assert positions.exclude_path(0) == "exclude"
    assert Positions("all", exclude=[2, 3]).exclude_path(1) == "exclude[1]"
