"""Requests of token ids to an engine in this process."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

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


@contextmanager
def preempting(llm: Any, *numbers: int) -> Iterator[None]:
    """Before the engine's steps of these numbers all requests that run start over."""
    step, steps = llm.llm_engine.step, itertools.count(1)

    def resetting() -> Any:
        number = next(steps)
        if number in numbers:
            assert llm.reset_prefix_cache(reset_running_requests=True)
        return step()

    with mock.patch.object(llm.llm_engine, "step", resetting):
        yield
    assert next(steps) > max(numbers), "the requests ended before"
