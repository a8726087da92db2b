"""`Prompt`: a prompt's length, token ids, text and chat messages, for locating positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from midstream.errors import SpecError
from midstream.plan.positions.text_map import TextMap

if TYPE_CHECKING:
    from midstream.plan.positions.prompt_index import TokenIndex


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message, located in the prompt.

    Attributes:
        role: as given by the caller.
        index: index among all messages, from 0.
        start: position of the first token with a character of the message's content.
        stop: position after the last such token; equal to `start` if there is no content.
        problem: why the tokens are unknown; then `start` and `stop` are invalid. None: known.
    """

    role: str
    index: int
    start: int = 0
    stop: int = 0
    problem: str | None = None


@dataclass(frozen=True)
class Prompt:
    """A prompt: its length, and optional information for locating positions.

    `text` and `messages` may be functions, which are called at most once, on first use.

    Attributes:
        length: P, in tokens, at least 1.
        token_ids: the id of each token; None: unknown, as with prompt embeddings.
        text: the text and each token's span in it; None: unknown.
        messages: the chat's messages; None: the prompt was not made from a chat.

    Raises:
        SpecError: a length below 1, or a number of token ids other than `length`.
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
        """`text`, evaluated if it is a function.

        Raises:
            SpecError: raised by the function, or the text has another number of tokens.
        """
        text = self.text() if callable(self.text) else self.text
        if text is not None and len(text) != self.length:
            raise SpecError(
                "", f"the text has {len(text)} tokens, but the prompt has {self.length}"
            )
        return text

    @cached_property
    def chat(self) -> tuple[Message, ...] | None:
        """`messages`, evaluated if it is a function.

        Raises:
            SpecError: raised by the function.
        """
        return self.messages() if callable(self.messages) else self.messages

    @cached_property
    def roles(self) -> Mapping[str, list[Message]] | None:
        """The messages of `chat` by role, in the order of the chat.

        Raises:
            SpecError: raised by the function `messages`.
        """
        if self.chat is None:
            return None
        messages_by_role: dict[str, list[Message]] = {}
        for message in self.chat:
            messages_by_role.setdefault(message.role, []).append(message)
        return messages_by_role

    @cached_property
    def token_index(self) -> TokenIndex | None:
        """Finds tokens by their ids; None: `token_ids` are unknown."""
        from midstream.plan.positions.prompt_index import TokenIndex  # imports numpy

        return None if self.token_ids is None else TokenIndex(self.token_ids)
