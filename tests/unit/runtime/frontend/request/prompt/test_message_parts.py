"""What answers thought and said, and their tool calls, in the tokens of a chat template."""

import time

import pytest
from support.chat_templates import TEMPLATES, with_template

from midstream.errors import SpecError
from midstream.plan.positions.decoded_text import decode
from midstream.runtime.frontend.request.prompt.message_parts import PartFinder
from midstream.runtime.frontend.request.prompt.message_spans import message_spans

ASKED = {"role": "user", "content": "what is two plus two?"}
THOUGHT = {"role": "assistant", "content": "<think>\nadd them\n</think>\n\nfour"}
REASONED = {
    "role": "assistant",
    "content": "four",
    "reasoning_content": "add them",
    "thinking": "add them",
}
CALLS = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "two"}}}
    ],
}
RESULT = {"role": "tool", "content": '{"sum": "4"}'}
AGAIN = {"role": "user", "content": "and three?"}


def found(template: str, messages: list[dict], part: str, add: bool = False) -> list[str]:
    """What the tokens of a part of each message spell, or its problem."""
    tokenizer = with_template(template)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    spans = message_spans(tokenizer, messages, ids, part=part, add_generation_prompt=add)
    assert [span.index for span in spans] == list(range(len(messages)))
    return [span.problem or decode(tokenizer, ids[span.start : span.stop]) for span in spans]


DROPS = "the chat template leaves out its thinking"


@pytest.mark.parametrize(
    ("template", "answer", "thinking"),
    [
        ("qwen", THOUGHT, "add them"),
        ("qwen", REASONED, "add them"),
        ("harmony", REASONED, "add them"),
        ("deepseek", THOUGHT, DROPS),
        ("deepseek", REASONED, DROPS),
        ("glm", THOUGHT, DROPS),
    ],
)
def test_thinking_is_selected_or_said_to_be_dropped(template, answer, thinking):
    chat = [ASKED, answer]
    assert found(template, chat, "thinking") == ["", thinking]
    assert found(template, chat, "answer") == [ASKED["content"], "four"]
    # What an earlier answer thought is dropped by all of them.
    later = [*chat, AGAIN]
    assert found(template, later, "thinking", add=True) == ["", DROPS, ""]
    assert found(template, later, "answer", add=True)[1] == "four"


def test_channels_of_a_harmony_chat_are_parts():
    """Analysis, commentary and final; a tool's result is written as JSON."""
    said = {**REASONED, "thinking": "it is in the result"}
    chat = [ASKED, {**CALLS, "thinking": "call it"}, RESULT, said]
    assert found("harmony", chat, "thinking") == ["", "call it", "", "it is in the result"]
    calls = 'add<|channel|>commentary json<|message|>{"a": 2, "b": "two"}'
    assert found("harmony", chat, "tool_calls") == ["", calls, "", ""]
    assert found("harmony", chat, "answer")[3] == "four"
    assert found("harmony", chat, "content")[2] == r"{\"sum\": \"4\"}"


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        ("qwen", 'add", "arguments": {"a": 2, "b": "two"}'),
        ("glm", "add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n<arg_key>b</arg_key>\n"
                "<arg_value>two"),
    ],
)  # fmt: skip
def test_tool_calls_are_selected_from_the_first_name_to_the_last_argument(template, calls):
    assert found(template, [ASKED, CALLS, RESULT], "tool_calls") == ["", calls, ""]
    (call,) = CALLS["tool_calls"]
    both = {**CALLS, "tool_calls": [call, {"function": {"name": "halve", "arguments": {"c": "x"}}}]}
    first, second = found(template, [ASKED, both], "tool_calls")[1].split("halve")
    assert first.startswith(calls)
    assert "c" in second
    assert second.rstrip('}"').endswith("x")


def test_tool_calls_that_the_template_leaves_out_are_refused():
    assert found("deepseek", [ASKED, {**CALLS, "content": "calling"}], "tool_calls") == [
        "", "the chat template leaves out its tool calls, or rewrites them"
    ]  # fmt: skip
    odd = {**CALLS, "tool_calls": [{"type": "search"}]}
    tokenizer = with_template("deepseek")
    (span,) = message_spans(
        tokenizer, [odd], tokenizer("<bos><|Assistant|><eos>")["input_ids"], part="tool_calls"
    )
    assert span.problem == "its tool calls are not those of functions"


@pytest.mark.parametrize("template", list(TEMPLATES))
def test_messages_without_a_part_have_none(template):
    asked = {"role": "user", "content": "what does </think> mean?"}
    chat = [asked, {"role": "assistant", "content": "four </thin"}, AGAIN]
    for part in ("thinking", "tool_calls"):
        assert found(template, chat, part) == ["", "", ""]
    assert found(template, chat, "answer") == found(template, chat, "content")


def test_thinking_is_found_in_a_content_given_as_parts():
    """As clients of OpenAI's API write it."""
    text = THOUGHT["content"]
    for content in ([{"type": "text", "text": text}], [text]):
        finder = part_finder({**THOUGHT, "content": content})
        assert finder.thinking(0, {**THOUGHT, "content": content}) == (21, 29)
        assert finder.answer(0, {**THOUGHT, "content": content}) == (40, 44)
    parts = {"type": "text", "text": "<think>so</think>"}, {"type": "text", "text": "four"}
    thinking = {"type": "thinking", "thinking": "so"}, parts[1]
    for content in (parts, thinking):
        message = {**THOUGHT, "content": list(content)}
        for find in (part_finder(message).thinking, part_finder(message).answer):
            with pytest.raises(SpecError, match="of several parts, of which one has its thinking"):
                find(0, message)
    message = {**THOUGHT, "content": [parts[1], parts[1]]}
    assert part_finder(message).answer(0, message) is None


def part_finder(message):
    def render(index, changed):
        content = changed["content"]
        if isinstance(content, list):
            content = "".join(part if isinstance(part, str) else part["text"] for part in content)
        return f"<|assistant|>{content}<|end|>"

    text = f"<|assistant|>{THOUGHT['content']}<|end|>"
    return PartFinder(render, text, "mark of none")


@pytest.mark.parametrize("content", [" " * 60_000, "a" + "\n" * 60_000, "<think>" + " " * 60_000])
def test_a_content_of_spaces_is_searched_for_thinking_once(content):
    message = {"role": "assistant", "content": content}
    start = time.process_time()
    assert part_finder(message).answer(0, message) is None
    assert time.process_time() - start < 1


REWRITES = "the chat template rewrites its thinking, or writes it more than once"


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("m.content ~ '|' ~ m.content", REWRITES),
        ("m.content | replace('them', 'it')", REWRITES),
        ("m.content | upper", DROPS),
        ("m.content[:15] ~ m.content[18:]", DROPS),
    ],
)
def test_thinking_that_is_written_twice_or_changed_is_refused(written, problem):
    tokenizer = with_template("qwen")
    template = f"{{% for m in messages %}}{{{{ {written} }}}}{{% endfor %}}"
    text = tokenizer.apply_chat_template([THOUGHT], chat_template=template, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    (span,) = message_spans(tokenizer, [THOUGHT], ids, part="thinking", chat_template=template)
    assert span.problem == problem
