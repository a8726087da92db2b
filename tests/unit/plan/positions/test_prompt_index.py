import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.long_lists import steps
from support.nightly import rounds
from support.slow_positions import find_text
from unit.plan.position_strategies import found_texts, prompt_of, prompts

from midstream.errors import SpecError
from midstream.plan.positions import prompt_index
from midstream.plan.positions.prompt_index import TokenIndex, merged
from midstream.plan.positions.ranges import merge
from midstream.plan.positions.text_map import TextMap
from midstream.plan.positions.work import MAX_MATCHES, WorkBudget

ANY_SPACE = " \n\t\u00a0\u3000\x1c"


@st.composite
def maps(draw: st.DrawFn) -> TextMap:
    """Tokens in any order that a TextMap allows: that share characters, overlap, or leave gaps."""
    text = draw(st.text("ab" + ANY_SPACE + "😀", max_size=14))
    spots = st.integers(0, len(text))
    starts = sorted(draw(st.lists(spots, min_size=1, max_size=8)))
    stops = sorted(draw(st.lists(spots, min_size=len(starts), max_size=len(starts))))
    pairs = [(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True)]
    stops = sorted(stop for _, stop in pairs)
    return TextMap(text, tuple(starts), tuple(stops))


@given(maps(), st.lists(st.text("ab" + ANY_SPACE + "😀", min_size=1, max_size=6), max_size=6))
@settings(max_examples=rounds(suite=400, nightly=4000))
def test_texts_of_any_prompt_are_found_as_by_trying_each_place(known, texts):
    # One place of the text may be at the edges of two tokens that overlap, in either order.
    overlaps = any(start < stop for start, stop in zip(known.starts[1:], known.stops, strict=False))
    for wanted in [*texts, known.text[2:6] or "a", known.text or "a"]:
        places, expected = found_texts(known, wanted), find_text(known, wanted)
        assert (sorted(places) if overlaps else places) == (
            sorted(expected) if overlaps else expected
        ), wanted


def test_a_place_at_the_edges_of_two_tokens_that_overlap_is_found_for_both():
    known = TextMap("aa a", (0, 2), (3, 3))
    assert sorted(found_texts(known, " a")) == sorted(find_text(known, " a")) == [(0, 2), (2, 2)]


@given(prompts(longest=40), st.lists(st.text("ab \n", min_size=1, max_size=9), max_size=12))
@settings(max_examples=rounds(suite=200, nightly=2000))
def test_texts_of_growing_length_are_found_in_one_prompt(prompt, texts):
    known = prompt.text_map
    for wanted in texts:
        expected = find_text(known, wanted)
        assert found_texts(known, wanted) == expected
        numbers = known.index.find(wanted, WorkBudget())
        assert known.index.ranges(numbers, len(wanted)) == merge(expected)


def test_longer_texts_are_found_after_shorter_ones():
    text = "abbaababbaaabbbabaab"
    known = TextMap(text, tuple(range(len(text))), tuple(range(1, len(text) + 1)))
    for size in range(1, len(text)):
        for start in range(len(text) - size):
            wanted = text[start : start + size]
            assert found_texts(known, wanted) == find_text(known, wanted), wanted


def test_texts_are_found_in_a_long_prompt_of_one_letter():
    known = prompt_of([0] * 3000).text_map
    numbers = known.index.find("a" * 2990, WorkBudget())
    assert len(numbers) == 11
    assert known.index.ranges(numbers, 2990) == ((0, 3000),)
    assert not len(known.index.find("a" * 3001, WorkBudget()))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=20), st.sets(st.integers(0, 8)))
def test_tokens_of_some_ids_are_all_that_have_one_of_them(known, ids):
    found = TokenIndex(known).find(ids, WorkBudget())
    assert found == merge((nth, nth + 1) for nth, one in enumerate(known) if one in ids)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), max_size=12))
def test_the_union_of_ranges_is_that_of_merge(pairs):
    import numpy as np

    ranges = [(start, start + length) for start, length in pairs]
    starts = np.array([start for start, _ in ranges], dtype=np.int64)
    stops = np.array([stop for _, stop in ranges], dtype=np.int64)
    assert merged(starts, stops) == merge(ranges)


def test_occurrences_are_counted_before_they_are_listed(monkeypatch):
    known = prompt_of([0] * 100).text_map
    listed = []
    real = prompt_index.np.sort
    monkeypatch.setattr(
        prompt_index.np, "sort", lambda given: (listed.append(given), real(given))[1]
    )
    budget = WorkBudget()
    budget.match(MAX_MATCHES - 150)
    known.index.find("a", budget)
    assert len(listed) == 1
    with pytest.raises(SpecError, match="match 262193 tokens .* the budget is 262144"):
        known.index.find("aa", budget)
    assert len(listed) == 1
    # What was found before counts again: it is merged again.
    with pytest.raises(SpecError, match="the budget is 262144"):
        known.index.find("a", budget)


def test_a_text_costs_about_as_much_in_a_long_prompt_as_in_a_short_one():
    found = []
    for length in (100, 10_000):
        index = prompt_of([nth % 3 for nth in range(length)]).text_map.index
        index.find("ab" * 20, WorkBudget())  # sorts the suffixes
        texts = ["a" * 3 + "b" * nth for nth in range(1, 30)]
        count, _ = steps(lambda texts=texts, index=index: [
            index.find(one, WorkBudget()) for one in texts
        ])  # fmt: skip
        found.append(count)
    assert found[1] < 3 * found[0]
