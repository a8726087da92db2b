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
from midstream.plan.positions.items import Between, Role, Span, Text, TokenIds, Window
from midstream.plan.positions.positions import Positions


def test_positions_are_read_from_one_item_or_a_list():
    for value, include in (
        ("all", ("all",)),
        (["prompt", "last_row"], ("prompt", "last_row")),
        (3, (3,)),
        (np.int64(-1), (-1,)),
        ((1, 2), (1, 2)),
        (slice(5), (Span(0, 5),)),
        (slice(np.int32(1), 9, 2), (Span(1, 9, 2),)),
        (range(2, 8, 3), (Span(2, 8, 3),)),
        (range(-4, -1), (Span(-4, -1),)),
        ({"slice": [2]}, (Span(2),)),
        ({"slice": [1, None, None]}, (Span(1),)),
        ({"slice": (1, 9, 2)}, (Span(1, 9, 2),)),
        (
            [0, "last_prompt", slice(4, 6), {"slice": [8, 9]}],
            (0, "last_prompt", Span(4, 6), Span(8, 9)),
        ),
        (Window(-5, 0), (Window(-5, 0),)),
        ({"window": (0, None, 2)}, (Window(0, None, 2),)),
        ({"tokens": [7, 5]}, (TokenIds([5, 7]),)),
        ({"between": ["<a>", [7, 5]]}, (Between("<a>", (7, 5)),)),
        ({"between": [None, 7]}, (Between(None, [7]),)),
        ({"text": "Paris", "occurrence": -1}, (Text("Paris", -1),)),
        ([{"role": "user"}, Role("user", 0)], (Role("user", -1), Role("user", 0))),
        ({"role": "tool", "message": "all"}, (Role("tool", "all"),)),
    ):
        found = Positions.parse(value)
        assert found == Positions(value), value
        assert (found.include, found.phase, found.exclude) == (include, "all", ()), value
        assert all(type(item) is not np.int64 for item in found.include)
        assert hash(found) == hash(Positions(list(include)))
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
        ("thinking", "", r"got 'thinking'; use Between.\"<think>\", \"</think>\"., or Role"),
        ("last_promt", "", "expected one of `all`.*got 'last_promt' .did you mean `last_prompt`"),
        (["all", "first"], "[1]", "`generated`, `last_prompt`, `last_row`, got 'first'"),
        ([0, False], "[1]", "got `bool`"),
        (1.0, "", "got `float`"),
        ([[1]], "[0]", "got `list`"),
        ({1, 2}, "", "got `set`"),
        (2**31 + 1, "", r"within ±2\*\*31"),
        ([5, 6, 5], "[2]", "5 is listed twice"),
        ([slice(5), range(5)], "[1]", "0:5 is listed twice"),
        (slice(5, 5), "", "the span 5:5 is empty"),
        (slice(-1, -3), "", "the span -1:-3 is empty"),
        (slice(-3, 0), "", "the span -3:0 is empty"),
        (slice(0, 9, 0), "step", "at least 1, got 0"),
        (slice(1.5, 3), "start", "expected `int`, got `float`"),
        (slice(1, True), "stop", "expected `int`, got `bool`"),
        (range(0), "", r"range\(0, 0, 1\) is empty"),
        (range(9, 0, -1), "step", "at least 1, got -1"),
        (range(10**40), "stop", r"within ±2\*\*31, got an integer of 133 bits"),
        ({"slice": [1, 2, 3, 4]}, "slice", "expected 1 to 3 numbers, start, stop, step, got 4"),
        ({"slice": 3}, "slice", r"expected \[start, stop, step\], got `int`"),
        ({"slice": [0, "9"]}, "slice[1]", "expected `int`, got `str`"),
        ([0, {"slice": [0, 9, 0]}], "[1].slice[2]", "at least 1, got 0"),
        ({"windw": [0, 9]}, "", "one of `slice`.*got field 'windw' .did you mean `window`"),
        ({}, "", "a dict of one of `slice`, .*`image`, `audio`, `video`, got an empty one"),
        ({"text": "a", "slice": [0]}, "", "unknown field 'text'; known: `slice`"),
        ({"between": [5]}, "between", r"expected \[start, end\], a mark or null each"),
        ({"between": [None, None]}, "between", "expected a mark, got None for both"),
        ({"between": [[], 5]}, "between.start", "expected 1 to 16 token ids of a mark, got 0"),
        ({"between": [5, list(range(17))]}, "between.end", "expected 1 to 16 token ids.*got 17"),
        ({"between": [5, [-1]]}, "between.end", r"expected token ids, 0 to 2\*\*31 - 1, got -1"),
        ({"between": ["", 5]}, "between.start", "expected 1 to 65536 characters, got 0"),
        ({"between": [1.5, 5]}, "between.start", "expected a text, token ids or None, got `float`"),
        ({"between": [True, 5]}, "between.start", "got `bool`"),
        ([Between(5, "a"), {"between": [[5], "a"]}], "[1]", r"Between\(\[5\], 'a'\) is listed tw"),
        ({"window": [0]}, "window", "expected 2 to 3 numbers, start, stop, step, got 1"),
        ({"window": [3, 3]}, "window", r"Window\(3, 3\) is empty"),
        ({"window": [0, 3, 0]}, "window[2]", "at least 1, got 0"),
        ([0, {"tokens": [5, 5]}], "[1].tokens[1]", "token id 5 is listed twice"),
        ({"tokens": [5], "occurrence": 0}, "", "unknown field 'occurrence'; known: `tokens`"),
        (
            {"text": "a", "occurrence": "last_row"},
            "occurrence",
            "`int` or \"all\", got 'last_row'",
        ),
        ([TokenIds(5), {"tokens": 5}], "[1]", r"TokenIds\(5\) is listed twice"),
        ([TokenIds(list(range(4096))), 3, TokenIds(9999)], "[2]", "4096 token ids in total"),
        ({1: 2}, "", "field names must be `str`, got `int`"),
        (list(range(4097)), "", "expected at most 4096 items, got 4097; use slices"),
    )


def test_an_item_that_has_no_token_of_the_phase_is_refused():
    for item, phase in (
        ("generated", "prompt"),
        ("last_row", "prompt"),
        ("prompt", "generated"),
        ("last_prompt", "generated"),
        (-1, "generated"),
        (0, "generated"),
        (slice(None, -1), "generated"),
        (slice(0, 5, 7), "generated"),
        (Window(0, 5), "prompt"),
        (Window(-5, 0), "generated"),
        (Text("Paris"), "generated"),
        (Role("user"), "generated"),
    ):
        words = f'cannot select a token of phase "{phase}"'
        left_out = [] if item == "last_row" else [(("all", phase, [99, item]), "exclude[1]", words)]
        refused(
            lambda fields: Positions(*fields), ((["all", item], phase), "[1]", words), *left_out
        )


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


def test_an_unknown_phase_is_refused():
    words = "expected one of `all`, `prompt`, `generated`"
    refused(
        lambda phase: Positions("all", phase),
        *((phase, "phase", words) for phase in ("decode", 1, None, ["prompt"])),
    )


def test_what_is_left_out_is_read_as_strictly():
    refused(
        lambda exclude: Positions("all", exclude=exclude),
        ("all", "exclude", "expected one of `prompt`, `generated`, `last_prompt`, got 'all'"),
        (
            ["prompt", "last_row"],
            "exclude[1]",
            "expected one of `prompt`.*got 'last_row'",
        ),
        ([3, 3], "exclude[1]", "3 is listed twice"),
        (slice(5, 5), "exclude", "the span 5:5 is empty"),
        ({"tokens": [-1]}, "exclude.tokens[0]", "0 to 2"),
        (None, "exclude", "got `None`"),
        (list(range(4097)), "exclude", "at most 4096 items"),
    )
    refused(
        lambda include: Positions(include, exclude=3),
        (["all", "last_row"], "exclude", "use a separate capture or probe"),
    )


def test_what_is_left_out_may_be_one_item_a_list_or_nothing():
    assert Positions("all", exclude=3).exclude == (3,)
    assert Positions("all", exclude=[{"tokens": 3}, "prompt"]).exclude == (TokenIds(3), "prompt")
    assert Positions("all", exclude=[]) == Positions("all") != Positions("all", exclude=3)


def test_fields_beside_each_other_are_named_in_errors():
    refused(
        lambda fields: Positions.within(*fields),
        (([0, "x"], None, None), "positions[1]", "got 'x'"),
        (({"slice": [0, "9"]}, "all", None), "positions.slice[1]", "got `str`"),
        (("all", "x", None), "phase", "got 'x'"),
        ((Positions("all", "prompt"), "generated", None), "phase", "contradicts"),
        (("all", None, [0, "x"]), "exclude[1]", "got 'x'"),
        ((Positions("all", exclude=3), None, 4), "exclude", ""),
        ((Positions([0, "generated"]), "prompt", None), "positions[1]", "cannot select"),
    )


def test_fields_beside_positions_narrow_them():
    whole = Positions("all", exclude=3)
    assert Positions.within(whole, None) is whole
    assert Positions.within(whole, "prompt") == Positions("all", "prompt", 3)
    assert Positions.within(Positions("all", "prompt"), None, 3) == Positions("all", "prompt", 3)
    assert Positions.within(whole, None, [3]) == whole
    assert Positions.within([0, 1], None, []) == Positions([0, 1])


def test_positions_know_whether_they_need_more_than_the_prompts_length():
    for positions, needed in (
        (Positions([0, -1, slice(2, 3), Window(-5, 0), "last_row"]), False),
        (Positions(TokenIds(3)), True),
        (Positions(TokenIds(3), "generated"), False),
        (Positions("all", exclude=TokenIds(3)), True),
        (Positions("all", "generated", exclude=TokenIds(3)), False),
        (Positions([0, Text("a")]), True),
        (Positions("all", exclude=Role("user")), True),
        (Positions(Between(3, None), "generated"), True),
    ):
        assert positions.needs_prompt is needed, positions


def test_items_are_where_single_or_listed():
    positions = Positions([0, 1], exclude=2)
    assert positions.path(1) == "positions[1]"
    assert positions.exclude_path(0) == "exclude"
    assert Positions("all", exclude=[2, 3]).exclude_path(1) == "exclude[1]"
