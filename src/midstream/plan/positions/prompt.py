"""`Prompt`: a prompt's length, token ids, text, messages and media, for locating positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from midstream.errors import SpecError
from midstream.plan.positions.ranges import Ranges
from midstream.plan.positions.text_map import TextMap

if TYPE_CHECKING:
    from midstream.plan.positions.prompt_index import TokenIndex


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message; its content is at [start, stop) of the prompt, unless there is a problem."""

    role: str
    index: int
    start: int = 0
    stop: int = 0
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class MediaItem:
    """An image, audio or video; its placeholder is at [start, stop) of the prompt, its embeddings
    at `ranges` within that.
    """

    kind: str
    start: int
    stop: int
    ranges: Ranges


@dataclass(frozen=True)
class Prompt:
    """A prompt: its length P, and optional information for locating positions; None: unknown.

    `text` and `messages` may be functions, which are called at most once, on first use.
    """

    length: int
    token_ids: tuple[int, ...] | None = None
    text: TextMap | Callable[[], TextMap] | None = None
    messages: tuple[Message, ...] | Callable[[], tuple[Message, ...]] | None = None
    media: tuple[MediaItem, ...] = ()  # in the order of the prompt
    # Returns the id of a token, given by its text or its id, or raises a SpecError.
    token_id: Callable[[str | int], int] | None = None

    def __post_init__(self) -> None:
        if self.length < 1:
            raise SpecError("length", f"expected a prompt of at least 1 token, got {self.length}")
        if self.token_ids is not None and len(self.token_ids) != self.length:
            raise SpecError(
                "token_ids", f"expected {self.length}, one per token, got {len(self.token_ids)}"
            )

    @cached_property
    def text_map(self) -> TextMap | None:
        """`text`, evaluated if it is a function."""
        text = self.text() if callable(self.text) else self.text
        if text is not None and len(text) != self.length:
            raise SpecError(
                "", f"the text has {len(text)} tokens, but the prompt has {self.length}"
            )
        return text

    @cached_property
    def chat(self) -> tuple[Message, ...] | None:
        """`messages`, evaluated if it is a function."""
        return self.messages() if callable(self.messages) else self.messages

    @cached_property
    def roles(self) -> Mapping[str, list[Message]] | None:
        """The messages of `chat` by role, in the order of the chat."""
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
