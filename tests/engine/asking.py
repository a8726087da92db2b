"""Requests of token ids to an engine in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from support.engines import greedy, tokens


def ask_all(llm: Any, prompts: Sequence[Sequence[int]], params: Any = 4, **asked: Any) -> list[Any]:
    """Return the outputs of one call. `params` may be a number of greedy tokens."""
    if isinstance(params, int):
        params = greedy(params, detokenize=False)
    outputs: list[Any] = llm.generate(
        [tokens(prompt) for prompt in prompts], params, use_tqdm=False, **asked
    )
    return outputs


def ask(llm: Any, prompt: Sequence[int], params: Any = 4, **asked: Any) -> Any:
    """Return the output of one prompt."""
    return ask_all(llm, [prompt], params, **asked)[0]
