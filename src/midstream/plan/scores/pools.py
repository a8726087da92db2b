"""Pools of scores, over the tokens so far: the largest, the mean of the last, a moving average."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from midstream.errors import SpecError
from midstream.validation import kind, show

MOST_TOKENS = 4096  # of the window of a mean
NO_POOL = "none"
_FORM = re.compile(r"none|max|mean:([1-9][0-9]{0,3})|ema:(0?\.[0-9]{1,9})")
_POOLS = '"none", "max", "mean:8" (of the last 8 scores) or "ema:0.9"'


class PoolState(NamedTuple):
    """What a pool keeps of the scores so far; at first nothing.

    Attributes:
        last: of "max" and "ema", the last pooled score; of a mean, the sum of `block`; None: none.
        block: of a mean over n, the scores of the current n; fewer than n.
        sums: of the n scores before `block`, the sums of each and all after it; empty: none.
    """

    last: Any = None
    block: tuple[Any, ...] = ()
    sums: tuple[Any, ...] = ()


NOTHING_POOLED = PoolState()


def read_pool(pool: object) -> str:
    """Read a pool: "none", "max", "mean:n" with n up to 4096, or "ema:d"."""
    _parse(pool)
    return str(pool)


def pooled(pool: str, state: PoolState, scores: Iterable[Any]) -> tuple[PoolState, list[Any]]:
    """Return what the pool keeps after the next scores, and the pooled score of each.

    However the scores are divided over calls, the result is the same to the last bit. A score that
    is not finite counts at its own token alone, and in the means that it is in.

    Args:
        pool: as `read_pool` returns it.
        state: after the scores before; `NOTHING_POOLED` at first.
        scores: floats, or NumPy rows [outputs] of float64, which are pooled one by one.
    """
    size, decay = _known(pool)
    if pool == NO_POOL:
        return state, list(scores)
    if size:
        return _means(size, state, scores)
    last, values = state.last, []
    for score in scores:
        value, last = (_next if isinstance(score, float) else _next_row)(decay, last, score)
        values.append(value)
    return (PoolState(last) if last is not state.last else state), values


def _next(decay: float, last: float | None, score: float) -> tuple[float, float | None]:
    """Return the pooled score, and the last one that is finite: another would hold for ever."""
    if last is None:
        value = score
    elif decay:
        value = decay * last + (1 - decay) * score
    else:
        value = last if score <= last else score  # NaN is itself
    return value, value if math.isfinite(value) else last


def _next_row(decay: float, last: Any, score: Any) -> tuple[Any, Any]:
    """Return the same of a row; of outputs without a finite one yet, `last` is NaN."""
    import numpy as np

    last = np.full(score.shape, np.nan) if last is None else last
    value = decay * last + (1 - decay) * score if decay else np.maximum(score, last)
    value = np.where(np.isnan(last), score, value)
    return value, np.where(np.isfinite(value), value, last)


def _means(size: int, state: PoolState, scores: Iterable[Any]) -> tuple[PoolState, list[Any]]:
    """Return the means of the last `size` scores. Each is a sum of the end of one block of so many
    scores and of the beginning of the next: nothing is subtracted, and no error adds up.
    """
    total, block, sums = state.last, list(state.block), state.sums
    values = []
    for score in scores:
        block.append(score)
        total = score if len(block) == 1 else total + score
        place = len(block)
        if place == size:
            values.append(total / size)
            sums = tuple(accumulate(reversed(block)))[::-1]
            block = []
        elif sums:
            values.append((sums[place] + total) / size)
        else:
            values.append(total / place)
    return PoolState(total, tuple(block), sums), values


def _parse(pool: object) -> tuple[int, float]:
    """Return (size of the window of a mean or 0, decay of an average or 0)."""
    match = _FORM.fullmatch(pool) if isinstance(pool, str) else None
    if match is None:
        shown = show(pool) if isinstance(pool, str) else kind(pool)
        raise SpecError("", f"expected {_POOLS}, got {shown}")
    size, decay = match.groups()
    if size and int(size) > MOST_TOKENS:
        raise SpecError("", f"expected a mean of at most {MOST_TOKENS} scores, got {size}")
    return int(size or 0), float(decay or 0.0)


_known = functools.lru_cache(maxsize=64)(_parse)
