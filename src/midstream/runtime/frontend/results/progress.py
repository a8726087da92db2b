"""Running completions, as vLLM's front end knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class RequestProgress(NamedTuple):
    """A running completion."""

    prompt: str | None  # None: not given as text
    prompt_token_ids: tuple[int, ...] | None  # None: given as embeddings
    generated: tuple[int, ...]


def lengths_of(states: Mapping[str, Any], ids: Iterable[str]) -> dict[str, int]:
    """Return the number of generated tokens of each running completion, of vLLM's states by id."""
    return {
        request_id: len(states[request_id].detokenizer.output_token_ids)
        for request_id in ids
        if request_id in states
    }


def running_of(states: Mapping[str, Any], ids: Iterable[str]) -> dict[str, RequestProgress]:
    """Return a copy of the state of each running completion, of vLLM's states by id."""
    return {
        request_id: RequestProgress(
            state.prompt,
            None if state.prompt_token_ids is None else tuple(state.prompt_token_ids),
            tuple(state.detokenizer.output_token_ids),
        )
        for request_id in ids
        if (state := states.get(request_id)) is not None
    }
