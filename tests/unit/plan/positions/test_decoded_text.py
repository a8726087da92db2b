import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.tokenizers import byte_level, sentencepiece_like
from unit.plan.position_strategies import found_texts

from midstream.errors import SpecError
from midstream.plan.positions.decoded_text import decode, map_of_rendering, text_map

SENTENCEPIECE = sentencepiece_like()
BYTE_LEVEL = byte_level()
TOKENIZERS = [SENTENCEPIECE, BYTE_LEVEL]

texts = st.lists(
    st.sampled_from([*"the cat con", "  ", "\n\n", "é", "😀", " 😀", "a😀", "\ufffd", "<|im_end|>"])
    | st.characters(exclude_categories=("Cs",)),
    max_size=12,
).map("".join)


def _pieces(found):
    """What the tokens spell, those that share characters as one."""
    spans = dict.fromkeys(zip(found.starts, found.stops, strict=True))
    return [found.text[start:stop] for start, stop in spans]


def _encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _check(tokenizer, ids):
    found = text_map(tokenizer, ids)
    assert len(found) == len(ids)
    assert found.text == "".join(_pieces(found)) == decode(tokenizer, ids)
    return found


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(texts)
@settings(max_examples=rounds(suite=150, nightly=1200))
def test_the_pieces_of_a_text_are_together_the_decoded_text(tokenizer, text):
    _check(tokenizer, _encode(tokenizer, text))


@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=20))
@settings(max_examples=rounds(suite=150, nightly=1200))
def test_any_tokens_even_no_text_at_all_have_pieces_that_are_the_decoded_text(ids):
    _check(BYTE_LEVEL, ids)


@given(texts)
@settings(max_examples=rounds(suite=150, nightly=1200))
def test_each_token_of_bytes_has_just_the_characters_that_its_bytes_are_in(text):
    # The bytes of each token are known here, so its characters are as well.
    ids = BYTE_LEVEL(text.replace("<|im_end|>", ""), add_special_tokens=False)["input_ids"]
    found = text_map(BYTE_LEVEL, ids)
    char_of_byte = [nth for nth, char in enumerate(found.text) for _ in char.encode()]
    at = 0
    for start, stop, token in zip(found.starts, found.stops, ids, strict=True):
        size = len(BYTE_LEVEL.convert_ids_to_tokens(token))
        mine = char_of_byte[at : at + size]
        at += size
        assert start <= mine[0] < mine[-1] + 1 <= stop
    assert at == len(char_of_byte)


@given(texts.map(lambda text: text.replace("<|im_end|>", "")))
@settings(max_examples=rounds(suite=150, nightly=1200))
def test_tokens_that_end_where_a_character_does_end_their_piece(text):
    ids = _encode(BYTE_LEVEL, text)
    found = text_map(BYTE_LEVEL, ids)
    ends = list(itertools.accumulate(len(each) for each in BYTE_LEVEL.convert_ids_to_tokens(ids)))
    char_ends = itertools.accumulate(len(char.encode()) for char in found.text)
    whole = {end: nth + 1 for nth, end in enumerate(char_ends)}
    assert set(found.stops) == {whole[end] for end in ends if end in whole}


def test_tokens_that_cut_a_character_share_its_piece():
    for text, pieces in (
        ("he  a", ["he", "  ", "a"]),
        ("a\n\nb", ["a", "\n\n", "b"]),
        ("😀", ["😀"]),
        (" 😀!", [" 😀", "!"]),
        ("a😀b", ["a😀", "b"]),
        # The last byte of one and the first of the next are one token.
        ("😀😀", ["😀😀"]),
        ("é\ufffdx", ["é", "\ufffd", "x"]),
        ("x\ufffd", ["x", "\ufffd"]),
        ("a<|im_end|>b", ["a", "<|im_end|>", "b"]),
    ):
        assert _pieces(_check(BYTE_LEVEL, _encode(BYTE_LEVEL, text))) == pieces, text


def test_a_first_space_that_the_decoder_drops_is_nobodys():
    ids = _encode(SENTENCEPIECE, "the cat  a😀b<|im_end|>the")
    assert _pieces(_check(SENTENCEPIECE, ids)) == (
        ["the", " cat", " ", " a", "😀", "b", "<|im_end|>", " the"]
    )


def test_bytes_that_are_no_text_end_somewhere():
    # 0x80 alone is never a character.
    byte = _encode(BYTE_LEVEL, "😀")[-1]
    found = _check(BYTE_LEVEL, [byte] * 200 + _encode(BYTE_LEVEL, "he"))
    assert found_texts(found, "he") == [(200, 201)]


def test_decoding_takes_time_in_proportion_to_the_prompt():
    class Counting:
        decoded = 0

        def decode(self, ids, skip_special_tokens):
            assert skip_special_tokens is False
            self.decoded += len(ids)
            return "".join(map(chr, ids))

    tokenizer = Counting()
    assert len(text_map(tokenizer, [ord("x")] * 1000)) == 1000
    assert tokenizer.decoded < 5000


def test_a_tokenizer_that_decodes_otherwise_together_is_refused():
    class Sorting:
        def decode(self, ids, skip_special_tokens):
            return "".join(sorted(map(chr, ids)))

    with pytest.raises(SpecError, match="does not decode the prompt token by token"):
        text_map(Sorting(), [ord(char) for char in "hello"])


def test_the_tokenizers_own_offsets_are_used_for_the_text_that_was_tokenized():
    text = "<s>the  cat😀"
    found = map_of_rendering(SENTENCEPIECE, text, _encode(SENTENCEPIECE, text))
    assert found.text == text
    assert [text[slice(*each)] for each in zip(found.starts, found.stops, strict=True)][:4] == (
        ["<s>", "the", " ", " cat"]
    )


def test_tokens_of_a_slow_tokenizer_are_decoded():
    class Slow:
        def decode(self, ids, skip_special_tokens):
            return "".join(map(chr, ids))

    assert map_of_rendering(Slow(), "abc", b"abc").starts == (0, 1, 2)
    with pytest.raises(SpecError, match="not those of the chat as its template renders it"):
        map_of_rendering(Slow(), "abd", b"abc")


@pytest.mark.model
def test_smollm2s_pieces_are_together_the_decoded_text(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    text = "Hello  wörld 😀😀👨‍👩‍👧 \n\n\n cat concatenate<|im_end|> مرحبا 漢字\t𝔘𝔫𝔦   \ufffd end"
    found = _check(tokenizer, _encode(tokenizer, text))
    assert found.text == text
    assert "".join(_pieces(found)) == text
    ((first, stop),) = found_texts(found, "😀😀👨‍👩‍👧")
    assert decode(tokenizer, _encode(tokenizer, text)[first:stop]) == " 😀😀👨‍👩‍👧"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(st.lists(st.text("thecat \n", max_size=6), min_size=2, max_size=5), st.data())
@settings(max_examples=rounds(suite=150, nightly=1200))
def test_tokens_of_media_have_the_characters_of_what_stands_for_them(tokenizer, texts, data):
    mark = "<|im_end|>"
    (mark_id,) = _encode(tokenizer, mark)
    text = mark.join(texts)
    ids, media, known = [], [], []
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    for token, span in zip(whole["input_ids"], whole["offset_mapping"], strict=True):
        if token != mark_id:
            ids.append(token)
            known.append(span)
            continue
        held = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), min_size=1, max_size=4))
        media.append((len(ids), len(ids) + len(held)))
        ids += held
        known += [span] * len(held)
    found = map_of_rendering(tokenizer, text, ids, media)
    assert found.text == text
    for (start, stop), (first, last) in zip(
        zip(found.starts, found.stops, strict=True), known, strict=True
    ):
        assert (start, stop) == (first, last) or first == last


def test_what_stands_for_media_may_have_any_length_but_one_place():
    text = "he<|im_end|>the<|im_end|>cat"
    ids = _encode(BYTE_LEVEL, text)
    he, the, cat = (_encode(BYTE_LEVEL, word) for word in ("he", "the", "cat"))
    one = [*he, 0, 0, *cat]
    found = map_of_rendering(BYTE_LEVEL, text, one, [(len(he), len(he) + 2)])
    place = len(he)
    assert (found.starts[place], found.stops[place + 1]) == (2, 25)
    with pytest.raises(SpecError, match="not those of the chat"):
        map_of_rendering(BYTE_LEVEL, text, [*he, 0, *the, 0, 0], [(len(he), len(he) + 1)])
    with pytest.raises(SpecError, match="not those of the chat"):
        map_of_rendering(BYTE_LEVEL, text, [0, *ids], [(0, 1)])
    # Whether the first is "a", or "aa", cannot be told.
    a = _encode(BYTE_LEVEL, "a")
    with pytest.raises(SpecError, match="not those of the chat"):
        map_of_rendering(BYTE_LEVEL, "aaaa", [0, *a, 0], [(0, 1), (2, 3)])
    found = map_of_rendering(BYTE_LEVEL, "aaa", [0, *a, 0], [(0, 1), (2, 3)])
    assert found.starts == (0, 1, 2)


def test_a_tokenizer_that_is_fast_but_has_no_offsets_is_decoded():
    class Tekken:
        is_fast = True

        def decode(self, ids, **named):
            return BYTE_LEVEL.decode(ids, **named)

    ids = _encode(BYTE_LEVEL, "the cat")
    assert map_of_rendering(Tekken(), "the cat", ids) == text_map(BYTE_LEVEL, ids)
