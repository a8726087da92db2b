"""Scores of texts, and layers and strengths tried, on an async and on an offline engine."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from support.engines import greedy

WIDTH = 64
TEXTS = [[5, 6, 7, 8, 9], list(range(10, 60))]
PROMPTS = [[3, 4, 5], [50, 51]]


async def evaluate(llm: Any) -> dict[str, Any]:
    """Numbers and tokens of `score` and `tune` of either engine."""
    from midstream import Directions

    rows = np.random.default_rng(0).normal(size=(2, 6, 3, WIDTH))
    rows[0] += 1
    directions = Directions.from_rows(*rows)
    scores = await _ended(llm.score(TEXTS, edits=directions[1].steer(0.5)))
    tuning = await _ended(
        llm.tune(directions, PROMPTS, [0, 2], [0.5, 1.0], sampling_params=greedy(4))
    )
    return {
        "scores": [score.logprobs.tolist() for score in scores],
        "effect": tuning.effect.tolist(),
        "perplexity": tuning.perplexity.tolist(),
        "best": (tuning.best.layer, tuning.best.scale),
    }


async def _ended(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found
