from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from spec.strategies import PHASES, capture_positions, rows_of_item, spans

from midstream.errors import SpecError
from midstream.spec import Positions, Span


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
    ],
)
def test_positions_are_read_from_one_item_or_a_list(value, include):
    found = Positions.parse(value)
    assert found == Positions(value)
    assert (found.include, found.phase) == (include, "all")
    assert all(type(item) in (str, int, Span) for item in found.include)
    assert hash(found) == hash(Positions(list(include)))


def test_positions_of_positions_are_the_same():
    positions = Positions("all", phase="prompt")
    assert Positions.parse(positions) is positions


@given(capture_positions)
def test_what_is_emitted_is_read_back(positions):
    assert Positions(positions.emit(), positions.phase) == positions
    assert pickle.loads(pickle.dumps(positions)) == copy.deepcopy(positions) == positions


def test_a_span_counts_omitted_bounds_as_a_slice_does():
    assert Span() == Span(0, None, 1) == Span(None, None, None)
    assert str(Span(1, 9)) == "1:9"
    assert str(Span(-3, None, 2)) == "-3::2"


def test_a_range_of_negative_ints_selects_just_these():
    # Ints are counted from the prompt's end, so are a span's bounds; they agree below −1 only.
    assert Positions(range(-4, -1)).include == (Span(-4, -1),)
    for mixed in (range(-3, 0), range(-2, 2)):
        with pytest.raises(SpecError, match="counts from the prompt's end and from its start"):
            Positions(mixed)


@pytest.mark.parametrize(
    ("value", "path", "problem"),
    [
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
        ({"slice": []}, "slice", "expected 1 to 3 parts"),
        ({"slice": [1, 2, 3, 4]}, "slice", "expected 1 to 3 parts, start, stop, step, got 4"),
        ({"slice": 3}, "slice", r"expected \[start, stop, step\], got `int`"),
        ({"slice": [5, 5]}, "slice", "the span 5:5 is empty"),
        ({"slice": [0, "9"]}, "slice[1]", "expected `int`, got `str`"),
        ({"slice": [False]}, "slice[0]", "expected `int`, got `bool`"),
        ([0, {"slice": [0, 9, 0]}], "[1].slice[2]", "at least 1, got 0"),
        ({"span": [0, 9]}, "", "unknown field 'span'; known: `slice`"),
        ({}, "", "missing field `slice`"),
        ({1: 2}, "", "names of fields are `str`, got `int`"),
        (list(range(4097)), "", "at most 4096 items can be listed, got 4097; use slices"),
    ],
)
def test_what_selects_nothing_or_is_malformed_is_refused(value, path, problem):
    with pytest.raises(SpecError, match=problem) as caught:
        Positions(value)
    assert caught.value.path == path


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
    ],
)
def test_an_item_that_has_no_token_of_the_phase_is_refused(item, phase):
    with pytest.raises(SpecError, match=f'never has a token of phase "{phase}"') as caught:
        Positions(["all", item], phase)
    assert caught.value.path == "[1]"


@given(spans(bound=4))
def test_a_span_is_refused_for_a_phase_just_when_no_prompt_gives_it_a_token(span):
    for phase in PHASES[1:]:
        possible = any(
            (row < prompt_len) == (phase == "prompt")
            for prompt_len in range(1, 12)
            for row in rows_of_item(span, prompt_len, prompt_len + 20)
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
