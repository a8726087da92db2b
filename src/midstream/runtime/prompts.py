"""How many prompts a `generate` or `chat` call has, by vLLM's own reading of its argument."""

from __future__ import annotations

from typing import Any

from vllm.renderers.inputs.preprocess import conversation_to_seq, prompt_to_seq


def count_prompts(prompts: Any) -> int:
    """Prompts in `LLM.generate`'s first argument: a list of ints is one prompt."""
    return len(prompt_to_seq(prompts))


def conversations(messages: Any) -> list[Any]:
    """Conversations in `LLM.chat`'s first argument: a list of messages is one conversation."""
    return list(conversation_to_seq(messages))
