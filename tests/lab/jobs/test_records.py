"""What a line of data may be."""

import json
import os

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


def test_media_of_a_conversation_are_data_and_files_of_one_folder(tmp_path):
    allowed, data = tmp_path / "allowed", "data:image/png;base64,AAEC"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(b"\0\1\2")
    (allowed / "folder").mkdir()
    (tmp_path / "out.png").write_bytes(b"")
    (allowed / "link.png").symlink_to(tmp_path / "out.png")
    os.mkfifo(allowed / "pipe")

    def read(part, files=str(allowed)):
        text = json.dumps([{"role": "user", "content": [{"type": "text", "text": "?"}, part]}])
        found = read_text(4, f'{{"messages": {text}}}'.encode(), "messages", True, files)
        return found.reason if isinstance(found, Failed) else found.prompt[0]["content"][1]

    file = (allowed / "a b.png").as_uri()
    for part, wanted in (
        ({"type": "image_url", "image_url": {"url": data, "detail": "low"}}, None),
        ({"image_url": data}, None),
        ({"type": "input_audio", "input_audio": {"data": "AAEC", "format": "wav"}}, None),
        ({"type": "text", "text": "http://a", "image_url": None, "uuid": None}, None),
        ({"type": "image_url", "image_url": {"url": file}}, {"url": data}),
        ({"type": "input_image", "image_url": file}, data),
    ):
        assert read(part) == (part if wanted is None else {**part, "image_url": wanted})
    where = "messages[0].content[1]"
    for part, reason in (
        ({"image_url": {"url": "https://a/b.png"}}, f"{where}.image_url: 'https://a/b.png': exp"),
        ({"audio_url": "data:audio/wav,abc"}, f"{where}.audio_url: 'data:audio/wav,abc': exp"),
        ({"video_url": {"url": "a b.png"}}, f"{where}.video_url: 'a b.png': expected a `data:`"),
        ({"image_url": data, "uuid": "1"}, f"{where}.uuid: leave out"),
        ({"image_url": (tmp_path / "out.png").as_uri()}, "is not in `allowed_local_media_path`"),
        ({"image_url": (allowed / "link.png").as_uri()}, "is not in `allowed_local_media_path`"),
        ({"image_url": f"file://host{allowed}/a%20b.png"}, "is not in `allowed_local_media_path`"),
        ({"image_url": f"file://{allowed}/../out.png"}, "is not in `allowed_local_media_path`"),
        ({"image_url": (allowed / "none.png").as_uri()}, "none.png: No such file"),
        ({"image_url": (allowed / "folder").as_uri()}, "Is a directory"),
        ({"image_url": (allowed / "pipe").as_uri()}, "not a regular file"),
    ):
        assert reason in read(part), part
    assert "`engine_args` has no `allowed_local_media_path`, from which files are read" in read(
        {"image_url": file}, ""
    )


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
