import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.plan.position_strategies import PIECES, found_texts, prompt_of, prompts

from midstream.plan.positions.text_map import TextMap


def _map(*pieces: str) -> TextMap:
    starts, stops, text = [], [], ""
    for piece in pieces:
        starts.append(len(text))
        text += piece
        stops.append(len(text))
    return TextMap(text, tuple(starts), tuple(stops))


@given(prompts(), st.integers(0, 20), st.integers(0, 20))
def test_the_tokens_of_characters_are_those_that_have_one_of_them(prompt, start, stop):
    pieces = [PIECES[token] for token in prompt.token_ids]
    owners = [nth for nth, piece in enumerate(pieces) for _ in piece]
    wanted = owners[start:stop]
    first, end = prompt.text_map.tokens(start, min(stop, len(owners)))
    assert first <= end
    if wanted:
        assert (first, end) == (wanted[0], wanted[-1] + 1)
    else:
        assert not set(range(first, end)) & set(owners)


def test_texts_are_found_by_whole_tokens_but_for_whitespace():
    for pieces, wanted, found in (
        (["I", " love", " Paris", "."], "Paris", [(2, 3)]),
        (["I", " love", " Paris", "."], " Paris", [(2, 3)]),
        (["I", " love", " Paris", "."], "love Paris", [(1, 3)]),
        (["I", " love", " Par", "is", "."], "Paris", [(2, 4)]),
        (["Paris", "\n\n", "Paris\n"], "Paris", [(0, 1), (2, 3)]),
        (["Paris", "\n\n", "Paris\n"], "Paris\n", [(0, 2), (2, 3)]),
        ([" con", "cat", "enate"], "cat", [(1, 2)]),
        ([" concatenate"], "cat", []),
        (["Paris."], "Paris", []),
        ([".Paris"], "Paris", []),
        (["a", "a", "a"], "aa", [(0, 2), (1, 3)]),
        (["<|user|>", "hi"], "<|user|>", [(0, 1)]),
        (["ab", "c"], "bc", []),
        (["x"], "longer than the text", []),
        (["x", " =", " 5"], "x = ", [(0, 2)]),
        (["x", " =", " 5"], "x =", [(0, 2)]),
        (["x", " = ", "5"], "x = ", [(0, 2)]),
        (["x", " =", "  5"], "= ", [(1, 2)]),
        (["x", " =", "5"], "x = ", []),
        (["x ", "=", " 5"], " = ", [(1, 2)]),
        (["x ", "=5"], " =", []),
        (["x", " = 5"], "x = ", []),
        (["a ", " b"], "  ", []),
        (["x", " 5"], " ", []),
    ):
        assert found_texts(_map(*pieces), wanted) == found, pieces


def test_tokens_that_share_a_character_are_found_together():
    # " 😀" of three tokens, then "!".
    shared = TextMap("a 😀!", (0, 1, 1, 1, 3), (1, 3, 3, 3, 4))
    assert found_texts(shared, "😀") == [(1, 4)]
    assert found_texts(shared, "😀!") == [(1, 5)]
    assert shared.tokens(2, 3) == (1, 4)


def test_the_tokens_around_a_text_are_shown_once_each():
    assert _map("the", " concat", "enate", " end").around("cat") == ["the", " concat", "enate"]
    assert TextMap("a😀!", (0, 1, 1, 2), (1, 2, 2, 3)).around("😀") == ["a", "😀", "!"]
    assert _map("the").around("cat") is None


def test_the_number_of_tokens_is_the_maps_length():
    assert len(prompt_of([0, 5, 1]).text_map) == 3


def test_a_map_that_is_none_is_refused():
    for starts, stops in (
        ((0,), (1, 2)),
        ((1, 0), (2, 2)),
        ((0, 0), (2, 1)),
        ((0,), (4,)),
        ((2,), (1,)),
        ((-1,), (1,)),
    ):
        with pytest.raises(ValueError, match="starts and|comes after"):
            TextMap("abc", starts, stops)
