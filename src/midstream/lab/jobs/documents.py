"""Documents: the lines of a data set as token ids, with positions to capture and roles."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from midstream.errors import SpecError
from midstream.lab.jobs.job import Job, check_model
from midstream.lab.jobs.prompt_tokens import PromptParts, PromptTokens, shifted
from midstream.lab.jobs.records import Record
from midstream.plan.positions.decoded_text import text_map
from midstream.plan.positions.items import CONTENT, Role
from midstream.plan.positions.prompt import Message, Prompt
from midstream.plan.positions.ranges import merge
from midstream.plan.positions.select import select
from midstream.runtime.frontend.request.prompt.message_parts import REASONING
from midstream.runtime.frontend.request.prompt.message_spans import has_media, message_spans
from midstream.validation import at, read_json

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A line as token ids.

    Attributes:
        positions: those to capture, as ranges; None: the engine selects them.
        roles: ranges of positions of the messages, by role; None: not asked for.
    """

    line: int
    token_ids: tuple[int, ...]
    positions: Spans | None = None
    roles: Mapping[str, Spans] | None = None

    @property
    def prompt(self) -> PromptTokens:
        """The document as a prompt of its own."""
        return PromptTokens(self.token_ids, self.positions, PromptParts(roles=self.roles))


class PromptTokenizer:
    """The tokenizer of a job's model, with its chat template."""

    def __init__(self, job: Job) -> None:
        """Load the tokenizer as vLLM does.

        Raises:
            SpecError: the model's folder does not exist; or its tokenizer is of another kind.
            OSError, ValueError: transformers cannot load it.
        """
        from transformers import AutoTokenizer

        check_model(job)
        options = job.engine_args
        mode = options.get("tokenizer_mode", "auto")
        if mode not in ("auto", "hf"):
            raise SpecError("engine_args.tokenizer_mode", f"expected `auto` or `hf`, got {mode}")
        self.tokenizer: Any = AutoTokenizer.from_pretrained(
            options.get("tokenizer", job.model),
            revision=options.get("tokenizer_revision", job.revision or None),
            trust_remote_code=options.get("trust_remote_code", False),
        )
        self._template = _template(options.get("chat_template"))

    def encode(self, prompt: Any, add_generation_prompt: bool = True) -> tuple[int, ...]:
        """Return the token ids of a text or a conversation; raise SpecError if there are none."""
        from jinja2 import TemplateError

        try:
            if isinstance(prompt, str):
                return tuple(self.tokenizer.encode(prompt))
            arguments = self._arguments(add_generation_prompt)
            text = self.tokenizer.apply_chat_template(prompt, **arguments, tokenize=False)
            return tuple(self.tokenizer.encode(text, add_special_tokens=False))
        except (ValueError, TypeError, LookupError, TemplateError) as error:
            raise SpecError("", f"{type(error).__name__}: {error}") from error

    def prompt(self, prompt: Any, ids: tuple[int, ...], add_generation_prompt: bool) -> Prompt:
        """Return the prompt as positions are located in it."""

        def messages(part: str = CONTENT) -> tuple[Message, ...]:
            arguments = self._arguments(add_generation_prompt)
            return message_spans(self.tokenizer, prompt, ids, part=part, **arguments)

        return Prompt(
            len(ids),
            ids,
            lambda: text_map(self.tokenizer, ids),
            None if isinstance(prompt, str) else messages,
        )

    def _arguments(self, add_generation_prompt: bool) -> dict[str, Any]:
        template = {} if self._template is None else {"chat_template": self._template}
        return {"add_generation_prompt": add_generation_prompt, **template}


class DocumentReader:
    """Makes documents of the records of a job that cuts or packs prompts, or stores roles."""

    def __init__(self, job: Job) -> None:
        """Load the tokenizer; see `PromptTokenizer`."""
        self._tokenizer = PromptTokenizer(job)
        self._job = job
        (capture,) = job.plan.captures
        self._positions = capture.positions
        items = (*self._positions.include, *self._positions.exclude)
        # Packed prompts have positions of each document; token ids have no messages.
        self._selects = job.pack is not None or any(isinstance(item, Role) for item in items)

    @cached_property
    def separator(self) -> int:
        """Token between packed documents."""
        if self._job.separator is not None:
            return self._job.separator
        end = self._tokenizer.tokenizer.eos_token_id
        if not isinstance(end, int):
            raise SpecError("separator", "the tokenizer has no end-of-text token: give a token id")
        return end

    def text(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of a prompt, if it is to be kept."""
        if not self._job.keep_prompts:
            return None
        return str(self._tokenizer.tokenizer.decode(list(token_ids)))

    def read(self, record: Record) -> Document:
        """Make a document; raise SpecError for one that cannot be captured."""
        prompt = record.prompt
        assert isinstance(prompt, (str, list))
        if has_media(prompt):
            raise SpecError("", "images, audio and videos cannot be cut, packed or given roles")
        if isinstance(prompt, list):
            prompt = list(map(_as_templates_have_it, prompt))
        ends = isinstance(prompt, list) and prompt[-1]["role"] == "assistant"
        is_whole = (self._job.pack is not None or self._job.roles) and ends
        ids = self._tokenizer.encode(prompt, not is_whole)
        if not ids:
            raise SpecError("", "the prompt is empty")
        whole = self._tokenizer.prompt(prompt, ids, not is_whole)
        ids = ids[: self._job.truncate]
        cut = whole if len(ids) == whole.length else _cut(whole, ids, self._tokenizer.tokenizer)
        return Document(
            record.line,
            ids,
            self._selected(cut) if self._selects else None,
            _roles(cut, _parts_of(prompt)) if self._job.roles else None,
        )

    def _selected(self, prompt: Prompt) -> Spans:
        where = select(self._positions, prompt, self._job.max_tokens)
        if self._job.max_tokens == 1:
            return where.final(prompt.length, prompt.token_ids or ())
        if not where.is_bounded:
            raise SpecError("positions", "Role and generated tokens cannot be combined here")
        return tuple((start, stop) for start, stop in where.ranges if stop is not None)


def _cut(whole: Prompt, ids: tuple[int, ...], tokenizer: Any) -> Prompt:
    """Return the first tokens of a prompt; messages that begin behind them are not in it."""

    def messages(part: str = CONTENT) -> tuple[Message, ...]:
        assert callable(whole.messages)
        return tuple(
            replace(message, stop=min(message.stop, len(ids)))
            for message in whole.messages(part)
            if message.start < len(ids)
        )

    return Prompt(
        len(ids), ids, lambda: text_map(tokenizer, ids), messages if whole.messages else None
    )


def _parts_of(prompt: Any) -> list[str]:
    """Return the parts that messages of a conversation have; see `Role`."""
    fields = {name for message in prompt for name, value in message.items() if value}
    others = {"tool_calls": {"tool_calls"}, "thinking": set(REASONING)}
    return [CONTENT, *(part for part, names in others.items() if fields & names)]


def _roles(prompt: Prompt, parts: Sequence[str]) -> Mapping[str, Spans]:
    """Return the tokens of all parts of the messages of each role; see `Role`."""
    assert callable(prompt.messages)
    spans: dict[str, list[tuple[int, int]]] = {}
    for message in (message for part in parts for message in prompt.messages(part)):
        if message.problem is not None:
            problem = f"{message.role} message {message.index}: {message.problem}"
            raise SpecError("roles", problem)
        of_role = spans.setdefault(message.role, [])
        if message.start < message.stop:
            of_role.append((message.start, message.stop))
    return {
        role: tuple(shifted(merge(of_role), 0, prompt.length, 0)) for role, of_role in spans.items()
    }


def _as_templates_have_it(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM gives it to a template: text joined, arguments of calls parsed."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part if isinstance(part, str) else part.get("text") for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise SpecError("", f"the content of a message of {message['role']} is no text")
        content = "\n".join(texts)
    prepared = {**message, "content": content}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        prepared["tool_calls"] = list(map(_parsed, calls))
    return prepared


def _parsed(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    with at("tool_calls"):
        return {**call, "function": {**function, "arguments": read_json(function["arguments"])}}


def _template(value: Any) -> str | None:
    """Return a chat template of the engine's arguments, which may be in a file."""
    if value is None:
        return None
    text = os.fspath(value)
    if "\n" in text or "{" in text:
        return str(text)
    try:
        with open(text, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError("engine_args.chat_template", f"{text}: cannot be read: {error}") from None
