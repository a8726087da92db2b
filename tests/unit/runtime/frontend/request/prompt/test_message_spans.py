"""Tokens of each message of a chat, whatever its template makes of the contents."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nightly import rounds
from support.slow_positions import find_messages
from support.tokenizers import byte_level, sentencepiece_like

from midstream.errors import SpecError
from midstream.plan.positions.decoded_text import decode, map_of_rendering
from midstream.plan.positions.prompt import MediaItem
from midstream.plan.positions.work import MAX_RENDERED
from midstream.runtime.frontend.request.prompt.message_spans import (
    chat_params,
    chat_renderer,
    message_spans,
)

SENTENCEPIECE = sentencepiece_like()
BYTE_LEVEL = byte_level()

# Strips contents, and leaves out what earlier answers thought.
STRIPS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% set said = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}"
    "{% if m.role == 'assistant' and loop.last %}{% set said = m.content %}{% endif %}"
    "{{ said | trim }}</{{ m.role }}>{% endfor %}"
)

# Puts the system's message into the first of the user's, as Llama 2's does.
REORDERS = (
    "{% set ns = namespace(system='') %}"
    "{% for m in messages if m.role == 'system' %}{% set ns.system = m.content %}{% endfor %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}[INST] "
    "{% if loop.first and ns.system %}<<SYS>>\n{{ ns.system }}\n<</SYS>>\n\n{% endif %}"
    "{{ m.content | trim }} [/INST]{% else %} {{ m.content }}<s>{% endif %}{% endfor %}"
)

# Has the newest question only.
FORGETS = "{{ messages[-1].content }}"


def _chat(*contents, roles=("system", "user", "assistant", "user")):
    return [{"role": role, "content": each} for role, each in zip(roles, contents, strict=False)]


def _ids(tokenizer, messages, **template_kwargs):
    text = tokenizer.apply_chat_template(messages, tokenize=False, **template_kwargs)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _found(tokenizer, messages, **template_kwargs):
    """What the tokens of each message spell, or its problem."""
    ids = _ids(tokenizer, messages, **template_kwargs)
    before = copy.deepcopy(messages)
    found = message_spans(tokenizer, messages, ids, **template_kwargs)
    assert messages == before
    assert [each.index for each in found] == list(range(len(messages)))
    assert [each.role for each in found] == [each["role"] for each in messages]
    return [each.problem or decode(tokenizer, ids[each.start : each.stop]) for each in found]


CONTENTS = ("Be kind.", "the cat", "cat the cat", "the cat")


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, SENTENCEPIECE])
@given(contents=st.lists(st.text("the cat😀\n <|é", max_size=8), min_size=1, max_size=4))
@settings(max_examples=rounds(suite=75, nightly=600))
def test_the_tokens_of_a_message_are_all_that_have_a_character_of_its_content(tokenizer, contents):
    messages = _chat(*contents)
    text, places = "", []
    for message in messages:
        text += f"<|im_start|>{message['role']}\n"
        places.append((len(text), len(text) + len(message["content"])))
        text += f"{message['content']}<|im_end|>\n"
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    found = message_spans(tokenizer, messages, encoded["input_ids"])
    for span, (start, stop) in zip(found, places, strict=True):
        assert span.problem is None
        expected = {
            nth
            for nth, (first, end) in enumerate(encoded["offset_mapping"])
            if first < stop and end > start
        }
        assert set(range(span.start, span.stop)) == expected


@pytest.mark.parametrize("blank", [" ", "\n", "\n \n", "\t"])
def test_a_message_of_whitespace_has_the_tokens_that_the_template_wrote_for_it(blank):
    messages = _chat("he", blank, "he", blank)
    plain = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}"
    assert _found(BYTE_LEVEL, messages, chat_template=plain) == ["he", blank, "he", blank]
    parts = [{"role": "user", "content": [{"type": "text", "text": blank}] * 2}]
    template = (
        "{% for m in messages %}<u>{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    )
    assert _found(BYTE_LEVEL, parts, chat_template=template) == [blank * 2]


@pytest.mark.parametrize(
    ("content", "left_out"),
    [
        ("<think>hm, hi</think>\n\nhi there", "'<think>hm, hi</think>'"),
        ("hm</think>hi there", "'hm</think>'"),
        ("<think>" + "so " * 90 + "</think>he", "'<think>so so"),
    ],
)
def test_a_message_whose_thinking_a_template_drops_is_not_taken_for_the_rest(content, left_out):
    """As the templates of DeepSeek-R1 and GLM do with all answers but the last."""
    messages = _chat("a", "b", content, "c")
    found = _found(BYTE_LEVEL, messages, chat_template=STRIPS)
    assert (found[0], found[1], found[3]) == ("a", "b", "c")
    assert found[2].startswith(f"the chat template leaves out {left_out}")
    assert found[2].endswith("give the content without it, or select what is left by a Text")
    assert len(found[2]) < 300
    assert _found(BYTE_LEVEL, messages[:3], chat_template=STRIPS)[2] == content
    answer = content.split("</think>")[-1].strip()
    assert _found(BYTE_LEVEL, _chat("a", "b", answer, "c"), chat_template=STRIPS)[2] == answer


def test_a_message_whose_text_a_template_leaves_out_is_a_problem_of_that_message_only():
    messages = _chat("a", "b", "<think>only thought</think>", "c")
    spelt = _found(BYTE_LEVEL, messages, chat_template=STRIPS)
    assert spelt == ["a", "b", "the chat template rewrites it, or leaves it out", "c"]


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages[0].content | upper }}", "does not write it as it is"),
        ("{{ messages[0].content | replace('h', 'x') }}", "rewrites it, or leaves it out"),
        (
            "{{ messages[0].content }}{% if 'hi' in messages[0].content %}, hi{% endif %}",
            "writes it more than once",
        ),
    ],
)
def test_what_a_template_changes_or_repeats_is_refused(template, problem):
    found = _found(BYTE_LEVEL, [{"role": "user", "content": "hi"}], chat_template=template)
    assert found == [f"the chat template {problem}"]


def test_a_content_of_several_texts_goes_from_the_first_to_the_last():
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text }};{% endfor %}{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "system", "content": "he"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}],
        },
        {"role": "user", "content": "the"},
    ]
    assert _found(BYTE_LEVEL, messages, chat_template=template) == ["he", "the;cat", "the"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([{"type": "refusal", "refusal": "x"}], "type 'refusal', which is neither text nor media"),
        ([{"type": "text", "text": "a"}, 5], "type 'int', which is neither text nor media"),
        ({"text": "a"}, "its content is a `dict`, not text"),
    ],
)
def test_a_content_that_is_no_text_is_a_problem_of_that_message_only(content, problem):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "he"}]
    found = _found(BYTE_LEVEL, messages, chat_template=template)
    assert problem in found[0]
    assert found[1] == "he"


def test_a_message_without_content_has_no_tokens():
    messages = [{"role": "assistant", "content": None}, {"role": "user"}, *_chat("", "he")]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% endfor %}"
    assert _found(BYTE_LEVEL, messages, chat_template=template) == ["", "", "", "he"]


def test_a_prompt_that_is_not_the_rendered_chat_is_refused():
    messages = _chat("he", "the cat")
    ids = _ids(BYTE_LEVEL, messages)
    for other in (ids[:-1], [*ids, 5], ids[1:]):
        with pytest.raises(SpecError, match="not those of the chat as its template renders it"):
            message_spans(BYTE_LEVEL, messages, other)


def test_a_prompt_with_a_token_put_before_it_counts_that_token():
    bos = "<s>{{ messages[0].content }}"
    messages = [{"role": "user", "content": "he"}]
    (found,) = message_spans(
        BYTE_LEVEL, messages, _ids(BYTE_LEVEL, messages, chat_template=bos), chat_template=bos
    )
    assert (found.start, found.stop) == (1, 2)


def test_vllms_renderer_is_asked_for_the_text_with_the_calls_own_arguments():
    asked = []

    class Renderer:
        def render_messages(self, messages, params):
            asked.append(params)
            kwargs = params.get_apply_chat_template_kwargs()
            text = BYTE_LEVEL.apply_chat_template(messages, **kwargs)
            return messages, {"prompt": text} if text != "he" else {"prompt_token_ids": [1]}

    render = chat_renderer(
        Renderer(),
        chat_params(add_generation_prompt=True, chat_template_kwargs={"deep": True}, tools=[]),
    )
    messages = _chat(*CONTENTS)
    ids = _ids(BYTE_LEVEL, messages, add_generation_prompt=True)
    found = message_spans(BYTE_LEVEL, messages, ids, render=render)
    assert [decode(BYTE_LEVEL, ids[each.start : each.stop]) for each in found] == list(CONTENTS)
    assert asked[0].chat_template_kwargs["deep"] is True
    assert asked[0].chat_template_kwargs["tokenize"] is False
    tokens_only = chat_renderer(Renderer(), chat_params(chat_template=FORGETS))
    with pytest.raises(SpecError, match="made into tokens without a text"):
        tokens_only([{"role": "user", "content": "he"}])


JOINED = "{% for m in messages %}{{ m.content }}{% endfor %}"
FIRST_TWICE = "{{ messages[0].content }}{% for m in messages %}\n{{ m.content }}{% endfor %}"
MARKED = (
    "{% for m in messages %}{% if 'hi' in m.content %}!{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% if m.content | length > 5 %} (long){% endif %}{% endfor %}."
)
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
SPACED = "{% for m in messages %}\n\n{{ m.content | trim }}{% endfor %}"


@pytest.mark.parametrize(
    "template", [PLAIN, SPACED, STRIPS, REORDERS, FORGETS, JOINED, FIRST_TWICE, MARKED]
)
@given(contents=st.lists(st.text("hi \n</user>", max_size=9), min_size=1, max_size=5))
@settings(max_examples=rounds(suite=60, nightly=1000))
def test_messages_are_where_a_rendering_for_each_of_them_has_them(template, contents):
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = _chat(*contents, roles=roles)

    def render(chat):
        return BYTE_LEVEL.apply_chat_template(chat, chat_template=template, tokenize=False)

    text = render(messages)
    ids = _ids(BYTE_LEVEL, messages, chat_template=template)
    tokens = map_of_rendering(BYTE_LEVEL, text, ids)
    found = message_spans(BYTE_LEVEL, messages, ids, render=render)
    assert found == find_messages(messages, render, tokens)


@pytest.mark.parametrize("count", [4, 40, 400])
def test_a_chat_is_rendered_twice_however_many_messages_it_has(count):
    rendered = []

    def render(chat):
        rendered.append(len(chat))
        return "".join(f"<{m['role']}>{m['content']}</>" for m in chat)

    messages = [{"role": "user", "content": f" word {nth % 7}\n"} for nth in range(count)]
    ids = BYTE_LEVEL(render(messages), add_special_tokens=False)["input_ids"]
    rendered.clear()
    found = message_spans(BYTE_LEVEL, messages, ids, render=render)
    assert rendered == [count, count]
    assert all(one.stop > one.start for one in found)


def test_renderings_for_single_messages_have_a_budget():
    rendered = []

    def render(chat):
        rendered.append(len(chat))
        text = "".join(m["content"] for m in chat)
        return f"{len(text) % 7}{text}"  # depends on all contents

    messages = [{"role": "user", "content": f"word {nth};"} for nth in range(400)]
    ids = BYTE_LEVEL(render(messages), add_special_tokens=False)["input_ids"]
    rendered.clear()
    found = message_spans(BYTE_LEVEL, messages, ids, render=render)
    assert sum(rendered) <= 2 * 400 + MAX_RENDERED
    assert "and the budget is 65536; select by text or positions" in found[-1].problem


def test_words_like_the_marker_are_passed_over_in_one_search():
    contents = "".join(f"midstreamcontent{nth}mark" for nth in range(300))
    assert _found(BYTE_LEVEL, _chat(contents, "he")) == [contents, "he"]


# Writes images as vLLM's models have them in a prompt.
SEES = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|im_end|>{% endif %}{% endfor %}{% endif %}</{{ m.role }}>{% endfor %}"
)
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def _seen(messages, count):
    """What the tokens of each message spell, or its problem; each image takes `count` tokens."""
    ids, media = [], []
    (mark,) = BYTE_LEVEL("<|im_end|>", add_special_tokens=False)["input_ids"]
    for token in _ids(BYTE_LEVEL, messages, chat_template=SEES):
        if token == mark:
            media.append(
                MediaItem("image", len(ids), len(ids) + count, ((len(ids), len(ids) + count),))
            )
        ids += [token] * (count if token == mark else 1)
    found = message_spans(BYTE_LEVEL, messages, ids, chat_template=SEES, media=media)
    return [each.problem or decode(BYTE_LEVEL, ids[each.start : each.stop]) for each in found]


def _said(text):
    return {"type": "text", "text": text}


@pytest.mark.parametrize("count", [1, 3])
def test_the_content_of_a_message_with_images_is_text_and_images(count):
    image = "<|im_end|>" * count
    messages = [
        {"role": "system", "content": "he"},
        {"role": "user", "content": [PICTURE, _said("the cat")]},
        {"role": "assistant", "content": "the cat"},
        {"role": "user", "content": [_said("he"), PICTURE, PICTURE, _said("the"), PICTURE]},
        {"role": "user", "content": [PICTURE]},
        {"role": "user", "content": [{"image_url": "x"}, _said("<user>")]},
        {"role": "user", "content": "cat"},
    ]
    assert _seen(messages, count) == [
        "he",
        image + "the cat",
        "the cat",
        "he" + 2 * image + "the" + image,
        image,
        image + "<user>",
        "cat",
    ]


def test_media_are_rendered_without_being_loaded():
    rendered = []

    class Renderer:
        def render_messages(self, messages, params):
            rendered.extend(messages)
            return messages, {"prompt": "the cat"}

    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    messages = [
        {"role": "user", "content": [PICTURE, _said("he"), sound, {"image_pil": object()}]},
        {"role": "user", "content": "he"},
    ]
    assert chat_renderer(Renderer(), chat_params())(messages) == "the cat"
    picture, text, audio, pil = rendered[0]["content"]
    assert picture["image_url"] is audio["input_audio"] is pil["image_pil"] is None
    assert picture["uuid"]
    assert text == _said("he")
    assert rendered[1] == messages[1]
    assert messages[0]["content"][0] == PICTURE
