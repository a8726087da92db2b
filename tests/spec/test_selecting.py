from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec.strategies import capture_positions, rows_of, rows_of_item

from midstream.errors import SpecError
from midstream.spec import Positions, ResolvedCapture, Span
from midstream.spec.ranges import clip, well_formed
from midstream.spec.selecting import select

LAST_SAMPLED = "the last sampled token is never fed back, so it has no row"


def _rows(ranges, length):
    return {row for start, stop in clip(ranges, length) for row in range(start, stop)}


def _is_empty_handed(positions, prompt_len, max_tokens):
    """Whether nothing is selected even if generation goes on to its limit, or an int or span is
    wholly beyond it."""
    num_rows = prompt_len + max_tokens - 1
    return not any(
        rows_of(positions, prompt_len, generated) for generated in range(1, max_tokens + 1)
    ) or any(
        not rows_of_item(item, prompt_len, num_rows)
        for item in positions.include
        if not isinstance(item, str)
    )


@given(capture_positions, st.integers(1, 8), st.integers(1, 8))
@settings(max_examples=500)
def test_selecting_is_asking_of_each_row_whether_it_is_meant(positions, prompt_len, max_tokens):
    try:
        ranges, last_from = select(positions, prompt_len, max_tokens)
    except SpecError:
        assert _is_empty_handed(positions, prompt_len, max_tokens)
        return
    assert not _is_empty_handed(positions, prompt_len, max_tokens)
    assert well_formed(ranges)
    capture = ResolvedCapture((("resid_post", 0),), ranges, last_from)
    for generated in range(1, max_tokens + 1):
        expected = rows_of(positions, prompt_len, generated)
        length = prompt_len + generated - 1
        assert _rows(capture.final_ranges(length), length) == expected
        # What a worker captures before it knows the length must hold all of it.
        assert expected <= _rows(capture.worker_ranges, length)


@given(capture_positions, st.integers(1, 8))
@settings(max_examples=300)
def test_without_max_tokens_the_same_is_selected_as_with_a_large_one(positions, prompt_len):
    try:
        expected = select(positions, prompt_len, 100)
    except SpecError:
        with pytest.raises(SpecError):
            select(positions, prompt_len, None)
        return
    endless = positions.phase != "prompt" and any(
        isinstance(item, Span) and item.step > 1 and item.stop is None for item in positions.include
    )
    if endless:
        with pytest.raises(SpecError, match="needs a stop"):
            select(positions, prompt_len, None)
    else:
        assert select(positions, prompt_len, None) == expected


@given(capture_positions, st.integers(1, 8), st.integers(0, 30))
def test_a_request_that_ended_early_has_no_rows_past_its_end(positions, prompt_len, length):
    try:
        ranges, last_from = select(positions, prompt_len, 20)
    except SpecError:
        return
    capture = ResolvedCapture((("resid_post", 0),), ranges, last_from)
    assert all(start < stop <= length for start, stop in capture.final_ranges(length))


@pytest.mark.parametrize(
    ("include", "phase", "ranges", "last_from"),
    [
        ("all", "all", ((0, None),), None),
        ("all", "prompt", ((0, 10),), None),
        ("all", "generated", ((10, None),), None),
        ("prompt", "all", ((0, 10),), None),
        ("generated", "all", ((10, None),), None),
        ("last_prompt", "all", ((9, 10),), None),
        (-1, "all", ((9, 10),), None),
        (-10, "all", ((0, 1),), None),
        (13, "all", ((13, 14),), None),
        ("last", "all", (), 9),
        ("last", "generated", (), 10),
        (["last", 0], "all", ((0, 1),), 9),
        (["generated", "prompt"], "all", ((0, None),), None),
        (slice(2, 5), "all", ((2, 5),), None),
        (slice(-3, None), "all", ((7, None),), None),
        (slice(-3, None), "prompt", ((7, 10),), None),
        (slice(-30, -8), "all", ((0, 2),), None),
        (slice(8, 12), "generated", ((10, 12),), None),
        (slice(8, 1000), "all", ((8, 1000),), None),
        (slice(0, None, 4), "all", ((0, 1), (4, 5), (8, 9), (12, 13)), None),
        (slice(0, None, 4), "prompt", ((0, 1), (4, 5), (8, 9)), None),
        (slice(0, None, 4), "generated", ((12, 13),), None),
        (slice(0, 3, 2), "all", ((0, 1), (2, 3)), None),
        ([0, 1, 2, 7], "all", ((0, 3), (7, 8)), None),
    ],
)
def test_ten_prompt_tokens_and_at_most_five_generated(include, phase, ranges, last_from):
    assert select(Positions(include, phase), 10, 5) == (ranges, last_from)


def test_what_is_asked_for_does_not_depend_on_max_tokens():
    for include in ("all", "generated", slice(3, None), slice(3, 200)):
        assert select(Positions(include), 10, 5) == select(Positions(include), 10, 500)


def test_a_span_with_a_step_needs_an_end_only_where_there_is_none():
    with pytest.raises(SpecError, match="the span 0::2 needs a stop.*no max_tokens") as caught:
        select(Positions([0, slice(None, None, 2)]), 4, None)
    assert caught.value.path == "positions[1]"
    for positions in (Positions(slice(0, 5, 2)), Positions(slice(None, None, 2), "prompt")):
        assert select(positions, 4, None)


@pytest.mark.parametrize(
    ("include", "phase", "max_tokens", "path", "problem"),
    [
        (14, "all", 5, "positions", f"position 14 is out of range.*from -10 to 13; {LAST_SAMPLED}"),
        (15, "all", 5, "positions", "prompt has 10 tokens and max_tokens is 5.*from -10 to 13$"),
        ([0, -11], "all", 5, "positions[1]", "position -11 is out of range.*from -10 to 13$"),
        (-11, "all", None, "positions", "prompt has 10 tokens, so positions go from -10 up"),
        (slice(14, None), "all", 5, "positions", "the span 14: selects nothing: the prompt has 10"),
        ([0, slice(50, 60)], "all", 5, "positions[1]", "the span 50:60 selects nothing"),
        (slice(-3, 7), "all", 5, "positions", "the span -3:7 selects nothing"),
        (slice(20, -1), "all", None, "positions", "the span 20:-1 selects nothing"),
        (slice(0, -10), "all", 5, "positions", "the span 0:-10 selects nothing"),
        (
            "generated",
            "all",
            1,
            "positions",
            f"nothing is selected.*max_tokens is 1; {LAST_SAMPLED}",
        ),
        ("all", "generated", 1, "positions", f'only tokens of phase "generated".*; {LAST_SAMPLED}'),
        (
            "last",
            "generated",
            1,
            "positions",
            f'only tokens of phase "generated".*; {LAST_SAMPLED}',
        ),
        (
            [3, slice(2, 9)],
            "generated",
            5,
            "positions",
            'nothing.*only tokens of phase "generated"',
        ),
        (
            slice(10, 12),
            "prompt",
            5,
            "positions",
            'nothing.*only tokens of phase "prompt" are meant',
        ),
        (slice(0, 2**31, 2), "all", None, "positions", "1073741824 single positions.*65536"),
    ],
)
def test_what_selects_nothing_is_refused_and_explained(include, phase, max_tokens, path, problem):
    with pytest.raises(SpecError, match=problem) as caught:
        select(Positions(include, phase), 10, max_tokens)
    assert caught.value.path == path


def test_the_last_position_that_has_a_row_is_allowed():
    assert select(Positions(13), 10, 5) == (((13, 14),), None)
    assert select(Positions(9), 10, 1) == (((9, 10),), None)
    assert select(Positions(["prompt", "generated"]), 10, 1) == (((0, 10),), None)
