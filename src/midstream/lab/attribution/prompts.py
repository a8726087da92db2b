"""Prompts of a twin: token ids, and positions in them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from midstream.errors import SpecError
from midstream.plan.positions.decoded_text import decode, text_map
from midstream.plan.positions.following_text import one_token_id
from midstream.plan.positions.positions import Positions
from midstream.plan.positions.prompt import Prompt
from midstream.plan.positions.row_order import check_row_order
from midstream.plan.positions.select import select
from midstream.validation import as_list, at, kind, read_int, show

_FORMS = 'expected a text, token ids, messages of a chat, or {"prompt": …}'


class PromptReader:
    """Turns prompts into token ids, and selects positions in them."""

    def __init__(self, tokenizer: Any, vocabulary: int, max_length: int | None) -> None:
        """Create for a model; None: it has no tokenizer, or no known maximum length."""
        self.tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._max_length = max_length

    def ids(self, prompt: Any) -> list[int]:
        token_ids = self._ids(prompt)
        if not token_ids:
            raise SpecError("", "the prompt has no tokens")
        if self._max_length is not None and len(token_ids) > self._max_length:
            raise SpecError(
                "", f"the prompt has {len(token_ids)} tokens; this model takes {self._max_length}"
            )
        return token_ids

    def _ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, Mapping):
            fields = {name: as_list(prompt.get(name)) for name in ("prompt_token_ids", "prompt")}
            known = [name for name, value in fields.items() if not _is_empty(value)]
            if not known or not set(prompt) <= set(fields):
                names = sorted(map(str, prompt))
                raise SpecError("", f"{_FORMS}, got a dict with the fields {names}")
            with at(known[0]):
                return self._ids(fields[known[0]])
        if isinstance(prompt, str):
            return list(self._need("a text")(prompt)["input_ids"])
        prompt = as_list(prompt)
        if isinstance(prompt, (list, tuple)) and prompt:
            if all(isinstance(message, Mapping) for message in prompt):
                self._need("a chat")
                return list(
                    self.tokenizer.apply_chat_template(
                        list(prompt), add_generation_prompt=True, return_dict=True
                    )["input_ids"]
                )
            return [self._id(place, token) for place, token in enumerate(prompt)]
        got = "an empty list" if isinstance(prompt, (list, tuple)) else kind(prompt)
        raise SpecError("", f"{_FORMS}, got {got}")

    def _id(self, place: int, token: Any) -> int:
        with at(f"[{place}]"):
            token_id = read_int(token)
            if not 0 <= token_id < self._vocabulary:
                raise SpecError(
                    "", f"token ids go from 0 to {self._vocabulary - 1}, got {token_id}"
                )
            return token_id

    def _need(self, what: str) -> Any:
        if self.tokenizer is None:
            raise SpecError("", f"this model has no tokenizer for {what}; give token ids")
        return self.tokenizer

    def id_of(self, text: str) -> int:
        """Return the id of a text that is one token; see `one_token_id`."""
        return one_token_id(self._need(f"the token {show(text)}"), text)

    def texts(self, ids: list[int]) -> list[str]:
        """Return the text of each token; without a tokenizer its id."""
        if self.tokenizer is None:
            return [str(token) for token in ids]
        return [decode(self.tokenizer, [token]) for token in ids]

    def located(self, ids: list[int]) -> Prompt:
        """Return a prompt in which texts and token ids can be located."""
        text = None if self.tokenizer is None else partial(text_map, self.tokenizer, ids)
        return Prompt(len(ids), tuple(ids), text)

    def select(self, positions: Any, ids: list[int]) -> list[int]:
        """Return the selected positions of a prompt, ascending."""
        with at("positions"):
            parsed = Positions.parse(positions)
        check_row_order(parsed, len(ids))
        where = select(parsed, self.located(ids), 1)
        return [
            position
            for start, stop in where.final(len(ids), ids)
            for position in range(start, stop)
        ]


def _is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and not len(value))
