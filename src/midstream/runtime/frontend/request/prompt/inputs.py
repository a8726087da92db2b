"""Prompts of a call, counted as vLLM counts them, and errors for prompts that vLLM rejects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from vllm.renderers.inputs.preprocess import conversation_to_seq, prompt_to_seq

from midstream.errors import SpecError
from midstream.validation import kind, not_a_chat


def list_prompts(prompts: Any) -> list[Any]:
    """Return the prompts in `LLM.generate`'s first argument: a list of ints is one."""
    if not hasattr(prompts, "__len__") or "int" in str(getattr(prompts, "dtype", "")):
        ids = "; of an array or tensor of ids, its .tolist()" if hasattr(prompts, "dtype") else ""
        raise SpecError(
            "prompts",
            f"expected a text, a list of texts or of token ids, got {kind(prompts)}{ids}",
        )
    listed = list(prompt_to_seq(prompts))
    if any(isinstance(prompt, Mapping) and "role" in prompt for prompt in listed):
        raise SpecError("prompts", "expected prompts, got messages of a chat; give them to chat")
    return listed


def conversations(messages: Any) -> list[Any]:
    """Return the conversations in `LLM.chat`'s first argument: a list of messages is one."""
    items = messages if isinstance(messages, (list, tuple)) else [messages]
    text = next((item for item in items if isinstance(item, str)), None)
    if text is not None:
        raise not_a_chat(text, "generate(text)")
    return list(conversation_to_seq(messages))


@contextmanager
def named_refusals() -> Iterator[None]:
    """Raise errors of vLLM or a template for a prompt as SpecError; not those of a dead engine."""
    from jinja2 import TemplateError
    from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError

    try:
        yield
    except SpecError:
        raise
    except (ValueError, VLLMValidationError, VLLMUnprocessableEntityError) as error:
        raise SpecError("", str(error)) from error
    except (TypeError, LookupError, AttributeError, TemplateError) as error:
        # Raised by a template, or by vLLM, for a value of an unexpected type.
        raise SpecError("", f"{type(error).__name__}: {error}") from error
