"""Batches of requests, which `LLM` and `AsyncLLM` run, and prompts as token ids for them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from midstream.deadlines import all_of
from midstream.errors import SpecError
from midstream.lab.fit.prompts import (
    CapturedClass,
    is_chat,
    naming_fields,
    read_prompts,
    split_classes,
)
from midstream.plan.positions.following_text import following_ids, ids_after
from midstream.plan.readouts.capture import Capture
from midstream.validation import at, kind, show

Result = TypeVar("Result")


@dataclass(frozen=True)
class PromptBatch:
    """Requests that run together; lists have an entry per prompt; see `LLM.generate`."""

    prompts: Sequence[Sequence[int]]
    params: Sequence[Any]
    capture: Any = None
    edits: Any = None
    probes: Any = None


Steps = Generator[PromptBatch, list[Any], Result]
"""A job: it yields batches, gets their outputs, and returns its result."""


def run_steps(llm: Any, steps: Steps[Result]) -> Result:
    try:
        batch = next(steps)
        while True:
            outputs = llm.generate(
                [{"prompt_token_ids": list(ids)} for ids in batch.prompts],
                list(batch.params),
                capture=batch.capture,
                edits=batch.edits,
                probes=batch.probes,
                use_tqdm=False,
            )
            batch = steps.send(outputs)
    except StopIteration as end:
        result: Result = end.value
        return result


async def run_steps_async(llm: Any, steps: Steps[Result]) -> Result:
    """Run a job on an `AsyncLLM`; the requests of a batch run concurrently."""
    try:
        batch = next(steps)
        while True:
            count = len(batch.prompts)
            columns = [
                _each(name, getattr(batch, name), count) for name in ("capture", "edits", "probes")
            ]
            outputs = await all_of(
                _last(llm, ids, params, *row)
                for ids, params, *row in zip(batch.prompts, batch.params, *columns, strict=True)
            )
            batch = steps.send(outputs)
    except StopIteration as end:
        result: Result = end.value
        return result


async def capture_rows_async(
    llm: Any, positive: Any, negative: Any, capture: Capture
) -> tuple[CapturedClass, CapturedClass]:
    """Capture the prompts of both classes on an `AsyncLLM`; see `capture_rows`.

    Chats are captured as token ids, so positions that select messages are rejected.
    """
    ids = [
        token_ids
        for path, prompts in (("positive", positive), ("negative", negative))
        for token_ids in encode_prompts(path, prompts, llm.get_tokenizer)
    ]
    with naming_fields():
        outputs = await _capture_ids(llm, ids, capture)
    return split_classes(outputs, len(positive), capture.sites.names[0])


async def capture_texts_async(llm: Any, texts: Any, capture: Capture) -> list[Any]:
    """Capture the argument `texts` on an `AsyncLLM`, and return the outputs."""
    with naming_fields("layer"):
        return await _capture_ids(llm, encode_prompts("texts", texts, llm.get_tokenizer), capture)


async def _capture_ids(llm: Any, ids: list[list[int]], capture: Capture) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, detokenize=False)

    def steps() -> Steps[list[Any]]:
        return (yield PromptBatch(ids, [params] * len(ids), capture=capture))

    return await run_steps_async(llm, steps())


async def _last(
    llm: Any, ids: Sequence[int], params: Any, capture: Any, edits: Any, probes: Any
) -> Any:
    last = None
    prompt = {"prompt_token_ids": list(ids)}
    async for output in llm.generate(prompt, params, capture=capture, edits=edits, probes=probes):
        last = output
    return last


def _each(name: str, argument: Any, count: int) -> list[Any]:
    """Return the value of an argument for each prompt, as `LLM.generate` reads it."""
    if not isinstance(argument, (list, tuple)):
        return [argument] * count
    if name != "capture" and not any(
        value is None or isinstance(value, (list, tuple)) for value in argument
    ):
        if count > 1 and len(argument) > 1:
            raise SpecError(
                name,
                f"a flat list of {len(argument)} {name} for {count} prompts can be read two ways; "
                "give one list per prompt: [[a], [b]] for one each, [[a, b], [a, b]] for all of "
                "them each; a single value without a list is for all prompts",
            )
        return [argument] * count
    if len(argument) != count:
        raise SpecError(name, f"{len(argument)} entries for {count} prompts; give one, or one each")
    return list(argument)


def encode_prompts(path: str, prompts: Any, tokenizer_of: Callable[[], Any]) -> list[list[int]]:
    """Return the token ids of prompts. The assistant's turn is added to a chat that does not end
    with it.
    """
    encoded = [
        _encode(path, index, prompt, tokenizer_of)
        for index, prompt in enumerate(read_prompts(path, prompts))
    ]
    for prompt_index, ids in enumerate(encoded):
        if not ids:
            raise SpecError(f"{path}[{prompt_index}]", "expected at least one token")
    return encoded


def encode_texts(
    path: str, texts: Any, prompts: Any, tokenizer_of: Callable[[], Any]
) -> list[tuple[list[int], list[int]]]:
    """Return, of each text, the token ids of its prompt and those of the text after it, tokenized
    together with it (see `ids_after`); after token ids, as after any text.
    """
    prompt_ids = encode_prompts("prompts", prompts, tokenizer_of)
    read = read_prompts(path, texts)
    if len(prompt_ids) != len(read):
        raise SpecError("prompts", f"{len(prompt_ids)} for {len(read)} {path}; give one each")
    pairs = []
    for index, (text, prompt, before) in enumerate(zip(read, prompts, prompt_ids, strict=True)):
        with at(f"{path}[{index}]"):
            after = _after(text, prompt, before, tokenizer_of) if isinstance(text, str) else None
            pairs.append((before, _ids("", text) if after is None else after))
            if not pairs[-1][1]:
                raise SpecError("", "expected at least one token")
    return pairs


def _after(text: str, prompt: Any, before: list[int], tokenizer_of: Callable[[], Any]) -> list[int]:
    """Return the token ids of a text that follows a prompt, whose token ids are `before`."""
    tokenizer = tokenizer_of()
    if not isinstance(prompt, str) and not is_chat(prompt):
        return following_ids(tokenizer, text)
    start = prompt if isinstance(prompt, str) else _rendered(prompt, tokenizer)
    # A template already has the special tokens.
    special = isinstance(prompt, str)
    whole = tokenizer(start + text, add_special_tokens=special)["input_ids"]
    token_ids = ids_after(tokenizer, before, whole, text)
    if token_ids is None:
        raise SpecError(
            "",
            f"after its prompt, {show(text)} has no tokens of its own: a token spans the end of "
            "the prompt and the beginning of the text; move the space between them into the other "
            "one, or give token ids",
        )
    return token_ids


def _encode(path: str, index: int, prompt: Any, tokenizer_of: Callable[[], Any]) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer_of()(prompt)["input_ids"])
    if is_chat(prompt):
        tokenizer = tokenizer_of()
        # The template already has the special tokens.
        text = _rendered(prompt, tokenizer)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return _ids(f"{path}[{index}]", prompt)


def _rendered(chat: Any, tokenizer: Any) -> str:
    """Return the text of a chat, with the assistant's turn begun, or going on with it."""
    goes_on = chat[-1].get("role") == "assistant"
    return str(
        tokenizer.apply_chat_template(
            list(chat),
            tokenize=False,
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
        )
    )


def _ids(path: str, prompt: Any) -> list[int]:
    if isinstance(prompt, dict) and set(prompt) == {"prompt_token_ids"}:
        prompt = prompt["prompt_token_ids"]
    if isinstance(prompt, (list, tuple)) and all(
        isinstance(token_id, (int, np.integer)) and not isinstance(token_id, bool)
        for token_id in prompt
    ):
        return [int(token_id) for token_id in prompt]
    raise SpecError(path, f"expected a text, or a list of token ids, got {kind(prompt)}")
