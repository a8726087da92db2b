"""Drafts with a chosen number of right tokens, and a host that gets the counts a step late."""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np


class Script:
    """In place of an engine's n-gram proposer (V1 runner, in this process): so many drafts are
    right, the next one is wrong.
    """

    def __init__(self, llm: Any, truth: Sequence[dict[str, Any]], right: int | None) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self._drafter = core.model_executor.driver_worker.worker.model_runner.drafter
        self._sequences = [[*one["prompt"], *one["generated"]] for one in truth]
        self._right = right
        self._draw = random.Random(0)

    def __enter__(self) -> None:
        self._propose = self._drafter.propose
        self._drafter.propose = self._scripted

    def __exit__(self, *_error: object) -> None:
        self._drafter.propose = self._propose

    def _scripted(
        self, count: int, sampled: list[list[int]], lengths: Any, token_ids: Any, *_: Any, **__: Any
    ) -> list[list[int]]:
        return [
            self._guess(token_ids[row, : lengths[row]].tolist(), count) if new else []
            for row, new in enumerate(sampled)
        ]

    def _guess(self, known: list[int], count: int) -> list[int]:
        if len(known) >= self._drafter.max_model_len:
            return []
        # The runner may have sampled beyond the end, which the scheduler then drops.
        whole = next(
            # A tie may have gone the other way; what follows is then a guess.
            (one for one in self._sequences if one[: len(known)] == known[: len(one)]),
            known,
        )
        right = self._right
        if right is None:
            count = self._draw.randint(0, count)
            right = self._draw.randint(0, count)
        # Whatever comes after the end is wrong, if anything can be.
        drafts = [*whole[len(known) :], *[3] * count][:count]
        if right < count:
            drafts[right] = drafts[right] % 100 + 1
        return drafts


@contextmanager
def optimistic(late: bool) -> Iterator[list[int]]:
    """The adapter of the V1 runner tells what it would with asynchronous scheduling, which vLLM
    has on GPUs only: counts as if all of the last step's drafts had been accepted. Gives the
    number of steps in which that was so.
    """
    from midstream.runtime.worker.model_runner import v1

    exactly = v1._batch
    before: dict[str, tuple[int, int]] = {}
    steps = [0]

    def batch(runner: Any, hooks: Any) -> Any:
        nonlocal before
        if not hooks._unknown.maxlen:
            hooks._unknown = deque([hooks._drafted], maxlen=1)
            return exactly(runner, hooks)
        told = exactly(runner, hooks)
        computed = np.array(told.computed)
        for nth, name in enumerate(told.request_ids):
            first, count = before.get(name, (0, 0))
            if first < computed[nth] <= first + count:
                computed[nth] = first + count
        exact = zip(told.request_ids, told.computed.tolist(), told.scheduled.tolist(), strict=True)
        before = {name: (first, count) for name, first, count in exact}
        steps[0] += told.unknown is not None
        assert (told.unknown is not None) or (computed == told.computed).all()
        return told._replace(computed=computed)

    if late:
        v1._batch = batch
    try:
        yield steps
    finally:
        v1._batch = exactly


__all__ = ["Script", "optimistic"]
