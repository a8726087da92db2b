"""A text that follows another has the tokens of a text that goes on."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.refusals import refused
from support.tokenizers import byte_level, metaspace, sentencepiece_like

from midstream.errors import SpecError
from midstream.lab.fit.batches import encode_texts
from midstream.plan.positions.following_text import following_ids, one_token_id

SPACED = {
    "put before": sentencepiece_like(),
    "first": metaspace("first"),
    "always": metaspace("always"),
    "never": metaspace("never"),
}
BYTES = byte_level()
texts = st.text("athect .", min_size=1, max_size=8)


def names(tokenizer: Any, ids: list[int]) -> list[str]:
    return tokenizer.convert_ids_to_tokens(ids)


def scored(tokenizer: Any, text: Any, prompt: Any) -> tuple[list[str], list[str]]:
    ((before, after),) = encode_texts("texts", [text], [prompt], lambda: tokenizer)
    return names(tokenizer, before), names(tokenizer, after)


def test_a_space_is_not_put_before_a_text_that_goes_on():
    for name, tokenizer in SPACED.items():
        start = "▁" if name != "never" else ""
        for text, wanted in ((" the", ["▁the"]), ("cat", ["cat"]), (" a cat", ["▁a", "▁cat"])):
            before, after = scored(tokenizer, text, "a.")
            assert (before, after) == ([*([f"{start}a"]), "."], wanted)
            assert names(tokenizer, following_ids(tokenizer, text)) == wanted
            ids = tokenizer.encode("a.", add_special_tokens=False)
            assert scored(tokenizer, text, ids)[1] == wanted
            assert scored(tokenizer, text, [{"role": "user", "content": "a"}])[1] == wanted
            assert scored(tokenizer, tokenizer.encode("the"), "a.")[1] == names(
                tokenizer, tokenizer.encode("the")
            )


def test_a_prompt_that_ends_with_the_space_keeps_it():
    for tokenizer in SPACED.values():
        before, after = scored(tokenizer, "cat", "the ")
        assert (before[-1], after) == ("▁", ["cat"])


def test_a_token_that_would_span_both_is_not_made():
    assert scored(BYTES, "e", "h") == (["h"], ["e"])
    assert names(BYTES, BYTES.encode("he")) == ["he"]
    assert scored(BYTES, " \n", " ")[1] == ["Ġ", "Ċ"]
    assert names(BYTES, following_ids(BYTES, "\n\n")) == ["ĊĊ"]


@pytest.mark.parametrize("tokenizer", [*SPACED.values(), BYTES])
@given(prompt=texts, text=texts)
def test_prompt_and_text_spell_what_both_spell_together(tokenizer, prompt, text):
    ((before, after),) = encode_texts("texts", [text], [prompt], lambda: tokenizer)
    assert before == tokenizer(prompt)["input_ids"]
    assert tokenizer.decode([*before, *after]) == tokenizer.decode(tokenizer.encode(prompt + text))


def test_special_tokens_are_themselves():
    for tokenizer in (*SPACED.values(), BYTES):
        (end,) = tokenizer.convert_tokens_to_ids(["<|im_end|>"])
        assert one_token_id(tokenizer, "<|im_end|>") == end
        assert following_ids(tokenizer, "cat<|im_end|>")[-1] == end


def test_a_word_is_the_token_that_spells_it_with_its_space():
    for tokenizer in SPACED.values():
        assert names(tokenizer, [one_token_id(tokenizer, " the")]) == ["▁the"]
        assert names(tokenizer, [one_token_id(tokenizer, "cat")]) == ["cat"]
        with pytest.raises(SpecError) as caught:
            one_token_id(tokenizer, "con")
        problem = "'con' is 3 tokens, 'c' 'o' 'n'; give a text that is one, as ' con' is"
        assert caught.value.problem == problem


def test_a_text_that_cannot_be_told_from_its_prompt_is_rejected():
    tokenizer = metaspace("never", joined=(" a", "cat"))
    problem = "after its prompt, 'a' has no tokens of its own: a token spans the end of the prompt"
    with pytest.raises(SpecError, match=problem) as caught:
        encode_texts("texts", ["a", "a"], ["the", "the "], lambda: tokenizer)
    assert caught.value.path == "texts[1]"


def test_what_is_malformed_is_refused():
    wrong = "expected a text, or a list of token ids"
    refused(
        lambda given: encode_texts("texts", *given, lambda: BYTES),
        ((["a"], ["b", "c"]), "prompts", "2 for 1 texts; give one each"),
        ((["a", ""], ["b", "c"]), "texts[1]", "expected at least one token"),
        ((["a", 3.5], ["b", "c"]), "texts[1]", wrong + ", got `float`"),
        ((["a", [1, "b"]], ["b", "c"]), "texts[1]", wrong),
    )
