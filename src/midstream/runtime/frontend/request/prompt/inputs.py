"""How many prompts a `generate` or `chat` call has, by vLLM's own reading of its argument."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.renderers.inputs.preprocess import conversation_to_seq, prompt_to_seq

from midstream.errors import SpecError


def count_prompts(prompts: Any) -> int:
    """Prompts in `LLM.generate`'s first argument: a list of ints is one prompt."""
    return len(prompt_to_seq(prompts))


def conversations(messages: Any) -> list[Any]:
    """Conversations in `LLM.chat`'s first argument: a list of messages is one conversation."""
    return list(conversation_to_seq(messages))


@contextmanager
def named_refusals() -> Iterator[None]:
    """What vLLM or a chat template raises of a prompt is raised as a SpecError; an engine that
    cannot go on is not.

    Raises:
        SpecError: the prompt cannot be taken.
    """
    from jinja2 import TemplateError
    from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError

    try:
        yield
    except SpecError:
        raise
    except (ValueError, VLLMValidationError, VLLMUnprocessableEntityError) as error:
        raise SpecError("", str(error)) from error
    except (TypeError, LookupError, AttributeError, TemplateError) as error:
        # Of a template, or of vLLM, that gets something else than it expects.
        raise SpecError("", f"{type(error).__name__}: {error}") from error
