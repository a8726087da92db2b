"""Messages in prompts that vLLM's server makes by harmony: of gpt-oss, with its own vocabulary."""

import time

import openai_harmony
import pytest
from vllm.entrypoints.openai.parser import harmony_utils

from midstream.errors import SpecError
from midstream.plan.positions.decoded_text import decode
from midstream.plan.positions.text_map import TextMap
from midstream.runtime.frontend.request.prompt.harmony import harmony_spans
from midstream.runtime.frontend.request.prompt.message_spans import message_spans

ENCODING = openai_harmony.load_harmony_encoding("HarmonyGptOss")
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
CHAT = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "What is two plus two?"},
    {"role": "assistant", "content": "Let me see.", "reasoning": "call it", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sum": "4"}', "tool_call_id": "1"},
    {"role": "assistant", "content": "Four.", "reasoning": "it is there"},
    {"role": "user", "content": "And three?"},
    {"role": "assistant", "content": None, "reasoning": "once more", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "5 – five", "tool_call_id": "1"},
]


class Tokenizer:
    """Has the vocabulary of harmony, and a template that vLLM's server does not use."""

    def decode(self, ids, skip_special_tokens):
        return ENCODING.decode(list(ids))

    def apply_chat_template(self, messages, tokenize):
        return "".join(f"[{message['role']}]{message['content']}" for message in messages)


def prompt(chat):
    instructions, rest = harmony_utils.extract_instructions_from_messages(chat)
    preamble = harmony_utils.build_harmony_preamble(instructions=instructions)
    messages = harmony_utils.parse_chat_inputs_to_harmony_messages(rest)
    return harmony_utils.render_for_completion([*preamble, *messages])


def found(chat, part, ids=None):
    ids = prompt(chat) if ids is None else ids
    spans = message_spans(Tokenizer(), chat, ids, part=part)
    assert [span.role for span in spans] == [message["role"] for message in chat]
    return [span.problem or decode(Tokenizer(), ids[span.start : span.stop]) for span in spans]


DROPPED = "harmony leaves out its thinking, as an answer follows it"


def test_contents_are_those_of_their_messages():
    contents = [message["content"] or "" for message in CHAT]
    for part in ("content", "answer"):
        assert found(CHAT, part) == contents
    assert found(CHAT[1:], "content") == contents[1:]


def test_channels_are_parts_and_what_harmony_drops_is_said():
    assert found(CHAT, "thinking") == ["", "", DROPPED, "", DROPPED, "", "once more", ""]
    assert found(CHAT[:4], "thinking") == ["", "", "call it", ""]
    calls = found(CHAT, "tool_calls")
    assert calls[2] == '.add<|channel|>commentary json<|message|>{"a": 2}'  # ".add" is one token
    assert calls[6].startswith(calls[2] + "<|call|><|start|>assistant")
    assert calls[6].endswith(calls[2])
    assert [calls[place] for place in (0, 1, 3, 4, 5, 7)] == [""] * 6


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (1, {"content": "What is one plus one?"}),
        (3, {"role": "user"}),
        (4, {"content": "Five."}),
        (6, {"tool_calls": [{**CALL, "function": {"name": "sub", "arguments": "{}"}}]}),
        (0, {"content": "Be verbose."}),
    ],
)
def test_a_message_that_the_prompt_does_not_have_is_refused(place, change):
    ids, chat = prompt(CHAT), list(CHAT)
    chat[place] = {**chat[place], **change}
    problems = found(chat, "content", ids)
    assert problems[place] == "the prompt does not have it as harmony writes it"
    longer = [*CHAT, CHAT[1], CHAT[1]]
    assert found(longer, "content", ids)[-1] == problems[place]


def test_calls_of_what_is_no_function_are_refused():
    odd = [*CHAT[:2], {**CHAT[2], "tool_calls": [{"type": "search"}]}]
    problem = "its tool calls are not those of functions"
    assert found(odd, "tool_calls", prompt(CHAT))[2] == problem


def test_another_prompt_that_is_not_the_templates_is_refused_as_before():
    ids = ENCODING.encode("<|start|>user<|message|>hi<|end|>", allowed_special="all")
    with pytest.raises(SpecError, match="not those of the chat as its template renders it"):
        message_spans(Tokenizer(), CHAT[1:2], ids)


@pytest.mark.parametrize("written", ["<|start|>", "<|start|><|message|>"])
def test_a_prompt_full_of_tokens_of_harmony_is_read_once(written):
    text = "<|start|>system<|message|>hi<|end|>" + written * 20_000
    start = time.process_time()
    harmony_spans([{"role": "user", "content": "hi"}], TextMap(text, (0,), (len(text),)), "content")
    assert time.process_time() - start < 2
