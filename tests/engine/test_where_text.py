"""Edits at the tokens of a text or of a message, by SmolLM2's tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support import tiny
from support.chat_templates import DEEPSEEK, QWEN
from support.edit_cases import Case, problems
from support.engines import engine, greedy
from support.marks import between
from support.oracle_edits import EVERY_SITE, PLACES, At, EditOracle
from transformers import AutoTokenizer

from midstream import Between, Capture, Role, Steer, Text
from midstream.errors import SpecError

pytestmark = pytest.mark.model

TOLERANCE = 1e-4
TIE = 1e-3
SITES = Capture([1, 2], EVERY_SITE)
VECTOR = torch.randn(tiny.HIDDEN, generator=torch.Generator().manual_seed(1))
PROMPT = "The capital of France is Paris. The capital of Italy is Rome, isn't it? The café."


@pytest.fixture(scope="module")
def model(smollm2: Path, tiny_models: Path) -> Path:
    """A tiny Llama with the tokens and the chat template of SmolLM2."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    config = {**tiny._GROUPED, "vocab_size": len(tokenizer)}
    path = tiny.make("llama-words", tiny_models, tiny.Tiny(lambda: hf.LlamaConfig(**config)))
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def oracle(model: Path) -> EditOracle:
    return EditOracle(model, PLACES["llama"])


@pytest.fixture(scope="module")
def llm(model: Path, oracle: EditOracle) -> Iterator[Any]:
    with engine(model, midstream={"sites": list(EVERY_SITE)}) as found:
        yield found


def spelt(llm: Any, text: str, ids: list[int], start: int, stop: int) -> set[int]:
    """The tokens that have characters of text[start:stop], by the tokenizer's own offsets."""
    found = llm.get_tokenizer()(text, return_offsets_mapping=True, add_special_tokens=False)
    assert found["input_ids"] == ids, "the offsets are not those of the prompt"
    return {nth for nth, (a, b) in enumerate(found["offset_mapping"]) if a < stop and b > start}


def steer(where: Any, **more: Any) -> Steer:
    return Steer(VECTOR, 1, scale=3.0, site="resid_mid", positions=where, **more)


def check(oracle: EditOracle, output: Any, edit: Steer, places: set[int]) -> None:
    at = At(edit, frozenset(places).__contains__)
    case = Case(str(edit.positions.include), output.prompt_token_ids, [at], tap=("resid_mid", 1))
    assert not problems(oracle, case, output, TOLERANCE, TIE)


@pytest.mark.parametrize(
    ("text", "occurrence", "spelling"),
    [
        ("capital", "all", [" capital", " capital"]),
        ("capital of", -1, [" capital", " of"]),
        ("isn't it?", "all", [" isn", "'", "t", " it", "?"]),
        ("caf\u00e9", "all", [" caf", "\u00e9"]),
    ],
)
def test_a_text_is_where_its_tokens_spell_it(llm, oracle, text, occurrence, spelling):
    edit = steer(Text(text, occurrence))
    output = llm.generate(
        PROMPT, greedy(3, logprobs=3), capture=SITES, edits=[edit], use_tqdm=False
    )[0]
    ids = output.prompt_token_ids
    starts = [at for at in range(len(PROMPT)) if PROMPT.startswith(text, at)]
    chosen = starts if occurrence == "all" else [starts[occurrence]]
    places = set().union(*(spelt(llm, PROMPT, ids, at, at + len(text)) for at in chosen))
    decode = llm.get_tokenizer().decode
    assert "".join(decode([ids[nth]]) for nth in sorted(places)) == "".join(spelling)
    check(oracle, output, edit, places)


TALK = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Is the sky blue?"},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And the grass? Is the sky blue?"},
]


def test_texts_and_roles_in_one_batch_of_chats(llm, oracle):
    talks = [TALK, TALK[:2], [{"role": "user", "content": "The sky is what? The sky!"}]]
    edit = steer([Role("user"), Text("sky", 0)])
    outputs = llm.chat(talks, greedy(2, logprobs=3), capture=SITES, edits=[edit], use_tqdm=False)
    seen = set()
    for talk, output in zip(talks, outputs, strict=True):
        text = llm.get_tokenizer().apply_chat_template(
            talk, tokenize=False, add_generation_prompt=True
        )
        content = talk[-1]["content"]
        places: set[int] = set()
        for start, wanted in ((text.rindex(content), content), (text.index("sky"), "sky")):
            places |= spelt(llm, text, output.prompt_token_ids, start, start + len(wanted))
        seen.add(frozenset(places))
        check(oracle, output, edit, places)
    assert len(seen) == 3


ANSWERED = [
    {"role": "user", "content": "Is the sky blue?"},
    {
        "role": "assistant",
        "content": "I look up.",
        "reasoning": "It is day.",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "look", "arguments": '{"at": "sky"}'},
            }
        ],
    },
    {"role": "tool", "content": '{"seen": "blue"}', "tool_call_id": "1"},
]


def test_parts_of_messages_are_where_the_template_writes_them(llm, oracle):
    """As vLLM renders them: fields of a message are given other names on the way."""
    call = 'look", "arguments": {"at": "sky"}'
    for part, wanted in (
        ("thinking", "It is day."),
        ("answer", "I look up."),
        ("tool_calls", call),
    ):
        edit = steer(Role("assistant", part=part))
        output = llm.chat(
            ANSWERED, greedy(3, logprobs=3), capture=SITES, edits=[edit], use_tqdm=False,
            chat_template=QWEN,
        )[0]  # fmt: skip
        ids = output.prompt_token_ids
        text = llm.get_tokenizer().decode(ids)
        start = text.index(wanted)
        check(oracle, output, edit, spelt(llm, text, ids, start, start + len(wanted)))
    with pytest.raises(
        SpecError, match="positions: the tokens of message 1 are unknown: .*thinking"
    ):
        llm.chat(
            [*ANSWERED, ANSWERED[0]], greedy(2), edits=steer(Role("assistant", part="thinking")),
            use_tqdm=False, chat_template=DEEPSEEK,
        )  # fmt: skip


def test_marks_may_be_the_texts_of_special_tokens(llm, oracle):
    edit = steer(Between("<|im_start|>", "<|im_end|>"))
    output = llm.chat(TALK, greedy(3, logprobs=3), capture=SITES, edits=[edit], use_tqdm=False)[0]
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
    start, end = llm.get_tokenizer().convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    check(oracle, output, edit, set(between(ids, [start], [end])))
    with pytest.raises(
        SpecError, match=r"positions\.start: '<think>' is 3 tokens, '<' 'think' '>'"
    ):
        llm.chat(TALK, greedy(2), edits=steer(Between("<think>", "</think>")), use_tqdm=False)
