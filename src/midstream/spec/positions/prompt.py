"""What is known of a prompt when positions are looked for in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from midstream.errors import SpecError
from midstream.spec.positions.text_map import TextMap


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a chat, in the prompt made of it.

    Attributes:
        role: as the caller wrote it.
        index: its place among all messages, from 0.
        start: position of the first token that has a character of its content.
        stop: past the last; equal to `start` if it has no content.
        problem: None, or why its tokens are not known: then it has no `start` and `stop` of use.
    """

    role: str
    index: int
    start: int = 0
    stop: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt: its length, and whatever else positions may be found by.

    What is costly may be given as a function, which is called at most once, when it is needed.

    Attributes:
        length: P, in tokens, at least 1.
        token_ids: the id of each token; None: not known, as with prompt embeddings.
        text: its text and each token's place in it; None: not known.
        messages: those of the chat that it was made of; None: it was not made of a chat.

    Raises:
        SpecError: a length below 1, or another number of token ids.
    """

    length: int
    token_ids: tuple[int, ...] | None = None
    text: TextMap | Callable[[], TextMap] | None = None
    messages: tuple[Message, ...] | Callable[[], tuple[Message, ...]] | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise SpecError("length", f"expected a prompt of at least 1 token, got {self.length}")
        if self.token_ids is not None and len(self.token_ids) != self.length:
            raise SpecError(
                "token_ids", f"expected {self.length}, one per token, got {len(self.token_ids)}"
            )

    @cached_property
    def text_map(self) -> TextMap | None:
        """`text`, worked out if it is a function.

        Raises:
            SpecError: the function's own, or it gives another number of tokens.
        """
        found = self.text() if callable(self.text) else self.text
        if found is not None and len(found) != self.length:
            raise SpecError("", f"the text is of {len(found)} tokens, the prompt of {self.length}")
        return found

    @cached_property
    def chat(self) -> tuple[Message, ...] | None:
        """`messages`, worked out if it is a function.

        Raises:
            SpecError: the function's own.
        """
        return self.messages() if callable(self.messages) else self.messages
