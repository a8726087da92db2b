"""What vLLM's front end knows of completions that run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class RequestProgress(NamedTuple):
    """What is known of a completion that runs.

    Attributes:
        prompt: its text; None where it was given otherwise.
        prompt_token_ids: None where it was given as embeddings.
        generated: token ids.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...] | None
    generated: tuple[int, ...]


def lengths_of(states: Mapping[str, Any], ids: Iterable[str]) -> dict[str, int]:
    """How many tokens each of some completions has generated; only of those that run.

    Args:
        states: vLLM's states of requests, by its ids.
        ids: theirs.
    """
    return {one: len(states[one].detokenizer.output_token_ids) for one in ids if one in states}


def running_of(states: Mapping[str, Any], ids: Iterable[str]) -> dict[str, RequestProgress]:
    """What is known of some completions; only of those that run. Arguments as of `lengths_of`."""
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
