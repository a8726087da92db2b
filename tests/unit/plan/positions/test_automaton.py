"""Tokens between marks, compared with a scan of the whole request, and selections made of them."""

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.marks import between, item
from support.nightly import rounds

from midstream.errors import NothingSelectedError, SpecError
from midstream.plan.positions.automaton import Automaton
from midstream.plan.positions.items import Between, Span, TokenIds
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.prompt import Prompt
from midstream.plan.positions.select import PromptSelections, in_listed_order, select

_TOKENS = st.integers(0, 3)
_MARK = st.lists(_TOKENS, min_size=1, max_size=3)
_PAIR = st.one_of(st.tuples(_MARK, _MARK), st.tuples(st.none(), _MARK), st.tuples(_MARK, st.none()))
_IDS = st.lists(_TOKENS, min_size=2, max_size=40)


def rows(where, ids):
    return [place for span in where.final(len(ids), ids) for place in range(*span)]


@given(_PAIR, _IDS, st.data())
@settings(max_examples=rounds(suite=300, nightly=3000))
def test_positions_between_marks_are_those_that_a_scan_finds(marks, ids, data):
    prompt = Prompt(data.draw(st.integers(1, len(ids) - 1)), None)
    prompt = replace(prompt, token_ids=tuple(ids[: prompt.length]))
    where = select(Positions(item(*marks)), prompt, None)
    expected = between(ids, *marks)
    assert rows(where, ids) == expected
    # In parts, with what was read before and without, also where some are read again.
    reached = {}
    while data.draw(st.integers(0, 5)):
        start = data.draw(st.integers(0, len(ids)))
        stop = data.draw(st.integers(start, len(ids)))
        mine = [place for place in expected if start <= place < stop]
        assert where.within(start, stop, ids.__getitem__, reached) == mine
        assert where.within(start, stop, ids.__getitem__) == mine


@given(_PAIR, _PAIR, st.sets(_TOKENS, min_size=1), _IDS, st.data())
@settings(max_examples=rounds(suite=300, nightly=3000))
def test_marks_are_united_and_left_out_like_other_items(one, other, listed, ids, data):
    length = data.draw(st.integers(1, len(ids) - 1))
    prompt = Prompt(length, tuple(ids[:length]))
    parts = {
        item(*one): set(between(ids, *one)),
        item(*other): set(between(ids, *other)),
        TokenIds(list(listed)): {place for place, token in enumerate(ids) if token in listed},
        Span(1, 9): set(range(1, min(9, len(ids)))),
        "all": set(range(len(ids))),
    }
    every = st.lists(st.sampled_from(list(parts)), unique=True)
    include = data.draw(every.filter(bool))
    exclude = data.draw(every.map(lambda chosen: [part for part in chosen if part != "all"]))
    phase = data.draw(st.sampled_from(["all", "prompt", "generated"]))
    inside = {"all": parts["all"], "prompt": set(range(length))}
    inside["generated"] = inside["all"] - inside["prompt"]
    united = set().union(*(parts[part] for part in include))
    left_out = set().union(*(parts[part] for part in exclude))
    expected = sorted((united - left_out) & inside[phase])
    try:
        where = select(Positions(include, phase, exclude), prompt, len(ids) - length + 1)
    except SpecError:
        assert not expected
        return
    assert rows(where, ids) == expected
    assert len(where.matches) <= 2
    if phase == "prompt" and len(include) == 1 and include != ["all"]:
        positions = Positions(include, phase, exclude)
        assert in_listed_order(positions, prompt, 9, 99) == expected


def test_of_an_end_mark_of_several_tokens_only_the_last_is_left_out():
    ids = [1, 7, 2, 8, 9, 3]
    where = select(Positions(Between(7, [8, 9])), Prompt(3, (1, 7, 2)), 4)
    assert rows(where, ids) == [2, 3]
    assert rows(where, ids[:4]) == [2, 3]


@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_mark_may_begin_within_what_looked_like_one(length):
    ids = [0, 1, 1, 1, 2, 5, 5]
    where = select(Positions(Between([1, 1, 2], None)), Prompt(length, tuple(ids[:length])), 9)
    assert rows(where, ids) == [5, 6]


def test_a_mark_is_a_text_of_one_token_or_token_ids():
    names = {"<think>": 5, "</think>": 6}

    def token_id(token):
        if token not in names and not isinstance(token, int):
            raise SpecError("", f"{token!r} is no token")
        return names.get(token, token)

    prompt = Prompt(3, (5, 1, 6), token_id=token_id)
    for start, end in (("<think>", "</think>"), (5, 6), ([5], [6]), ("<think>", [6])):
        assert select(Positions(Between(start, end)), prompt, 2).ranges == ((1, 2),)
    with pytest.raises(SpecError, match=r"^positions\.end: '</thnk>' is no token"):
        select(Positions(Between("<think>", "</thnk>")), prompt, 2)
    with pytest.raises(SpecError, match=r"positions\[1\]\.start: a text needs a tokenizer"):
        select(Positions([0, Between("<think>", None)]), Prompt(1, (1,)), 2)
    with pytest.raises(SpecError, match="positions: this prompt has no token ids.*which marks"):
        select(Positions(Between(5, 6)), Prompt(3), 2)


def test_what_is_between_no_marks_may_be_nothing_in_the_prompt_alone():
    prompt = Prompt(3, (1, 2, 3))
    with pytest.raises(NothingSelectedError, match="no token lies between the marks"):
        select(Positions(Between(5, 6), "prompt"), prompt, 9)
    assert rows(select(Positions(Between(5, 6)), prompt, 9), [1, 2, 3, 4]) == []


@pytest.mark.parametrize(
    "marks",
    [
        [Between([10 * n + k for k in range(9)], [10 * n + 9]) for n in range(4)],
        [Between([3] * 16, [3] * 15), Between([3] * 14, [3] * 13)],
        [Between([32 * n + k for k in range(16)], [32 * n + 17]) for n in range(1000)],
    ],
)
def test_too_many_marks_in_one_selection_are_refused(marks):
    start = time.process_time()
    with pytest.raises(SpecError, match="positions: too many marks.*of 128 states or 4096 trans"):
        select(Positions(marks), Prompt(1, (1,)), 9)
    assert time.process_time() - start < 2


def test_too_many_marks_in_all_selections_are_refused():
    """Also those of captures and probes, which no worker reads."""
    selections = PromptSelections(Prompt(1, (1,)), 9)
    marks = [range(16 * n, 16 * n + 16) for n in range(800)]
    items = iter([Between(list(marks[n]), list(marks[n + 1])) for n in range(0, 800, 2)])
    with pytest.raises(SpecError, match="positions: with this the positions of the plan match"):
        any(selections.select(Positions(item)).ranges for item in items)
    assert next(items)


def test_tokens_between_marks_are_sought_in_many_ranges_once():
    ids = [1, 5, *[2] * 20_000]
    positions = Positions(Between(5, 6), exclude=Span(4, 20_000, 2))
    where = select(positions, Prompt(1, (1,)), 20_001)
    start = time.process_time()
    assert rows(where, ids) == [2, *range(3, 20_000, 2), 20_000, 20_001]
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ids": (3, 2)}, "ids: expected ascending"),
        ({"kinds": (1,)}, "ids: .*a kind for each"),
        ({"kinds": (1, 3)}, "kinds: expected kinds from 0"),
        ({"selects": (True,)}, "selects: expected one for each of 2"),
        ({"moves": ((0, 1, 2), (0, 0, 0))}, "moves: expected a known state"),
        ({"moves": ((0, 1), (0, 0, 0))}, "moves: expected a known state for each kind"),
        ({"moves": (), "selects": ()}, "selects: expected one for each of 0"),
    ],
)
def test_an_automaton_in_a_message_is_checked(change, problem):
    made = Automaton(4, (2, 3), (1, 2), ((0, 1, 0), (0, 0, 1)), (False, True))
    made.check()
    with pytest.raises(SpecError, match=problem):
        replace(made, **change).check()
