"""What a line of data may be."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.lab.jobs.records import Failed, Record, read_text, read_value

TALK = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hello"}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("text", "column", "chat", "prompt"),
    [
        ('{"text": "one", "id": 3}', "text", False, "one"),
        ('"alone"', "text", False, "alone"),
        ('{"question": "?"}', "question", False, "?"),
        (json.dumps({"messages": TALK}), "messages", True, TALK),
        ('{"messages": "hi"}', "messages", True, [{"role": "user", "content": "hi"}]),
        ('"hi"', "messages", True, [{"role": "user", "content": "hi"}]),
        ('{"text": ""}', "text", False, ""),
        ('{"text": "\\ud83d\\ude00"}', "text", False, "😀"),
    ],
)
def test_a_line_has_its_prompt_in_a_field_or_is_the_prompt(text, column, chat, prompt):
    assert read_text(3, text.encode(), column, chat) == Record(3, prompt)


@pytest.mark.parametrize(
    ("text", "chat", "reason"),
    [
        (b"{", False, "expected JSON"),
        (b"[1]", False, "expected an object with a field 'text', or a string, got `list`"),
        (b"{}", False, "the field 'text' is missing; found none"),
        (b'{"text": null}', False, "text: expected the prompt's text, `str`, got `None`"),
        (b'{"text": "\\ud800"}', False, "text: '\\ud800' contains an unpaired surrogate"),
        (b'{"text": "a", "text": "b"}', False, "duplicate JSON field 'text'"),
        (b'{"text": [{"role": "user"}, {"content": "x"}]}', True, "text[1]: expected a message"),
        (b'{"text": [{"role": "user", "content": "\\udfff"}]}', True, "text[0]: "),
        (b"[" * 100_000, False, "nested too deeply"),
    ],
)
def test_what_is_no_prompt_is_a_failure_with_its_reason(text, chat, reason):
    found = read_text(9, text, "text", chat)
    assert isinstance(found, Failed)
    assert found.line == 9
    assert reason in found.reason


@given(value=JSON, chat=st.booleans())
def test_every_value_is_a_record_or_a_failure(value, chat):
    for found in (
        read_value(1, value, "text", chat),
        read_text(1, json.dumps({"text": value}).encode(), "text", chat),
    ):
        if isinstance(found, Failed):
            assert found.reason
        else:
            assert isinstance(found.prompt, list if chat else str)
