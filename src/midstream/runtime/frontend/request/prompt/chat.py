"""What a plan needs to know of the conversation that it rides with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.runtime.frontend.request.prompt.message_spans import chat_renderer, message_spans
from midstream.spec import Plan
from midstream.spec.positions.prompt import Message

# What `LLM.chat` hands to the chat template.
_TEMPLATE = (
    "chat_template",
    "chat_template_content_format",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """A plan of a request that is a conversation, whose messages it may speak of.

    Attributes:
        plan: what is asked for.
        messages: the conversation, as it was given.
        template: arguments of the chat template, by name.
    """

    plan: Plan
    messages: Any
    template: Mapping[str, Any]

    def __deepcopy__(self, _memo: dict[int, object]) -> ChatPlan:
        # vLLM copies a request's parameters; nothing here changes.
        return self

    def spans(self, engine: Any, tokenizer: Any, tokens: Sequence[int]) -> tuple[Message, ...]:
        """Where each message is in the prompt that was made of them.

        Raises:
            SpecError: the prompt is not what the template makes of the messages.
        """
        render = chat_renderer(engine.renderer, **self.template)
        return message_spans(tokenizer, self.messages, tokens, render=render)


def template_arguments(
    chat: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Those of a chat call's arguments that its template gets.

    Args:
        chat: vLLM's method, unbound.
        args: what follows `messages` and the sampling parameters.
        named: arguments by name.
    """
    bound = inspect.signature(chat).bind_partial(None, None, None, *args, **named)
    return {name: bound.arguments[name] for name in _TEMPLATE if name in bound.arguments}
