"""Running completions, as vLLM's front end knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class RequestProgress(NamedTuple):
    """A running completion.

    Attributes:
        prompt: text of the prompt; None: not given as text.
        prompt_token_ids: token ids of the prompt; None: given as embeddings.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    generated: tuple[int, ...]


def lengths_of(states: Mapping[str, Any], ids: Iterable[str]) -> dict[str, int]:
    """Return the number of generated tokens of each completion that is still running.

    Args:
        states: vLLM's states of running requests, by its ids.
    """
    return {one: len(states[one].detokenizer.output_token_ids) for one in ids if one in states}


def running_of(states: Mapping[str, Any], ids: Iterable[str]) -> dict[str, RequestProgress]:
    """Return a copy of the state of each completion that is still running.

    Args:
        states: vLLM's states of running requests, by its ids.
    """
    found = {}
    for one in ids:
        state = states.get(one)
        if state is not None:
            prompt = state.prompt_token_ids
            found[one] = RequestProgress(
                state.prompt,
                None if prompt is None else tuple(prompt),
                tuple(state.detokenizer.output_token_ids),
            )
    return found
