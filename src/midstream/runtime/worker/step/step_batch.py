"""The batch that a model runner computes next, in the form that the planner reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class UnknownPositions(NamedTuple):
    """What the host does not know yet: which draft tokens of the last steps were accepted."""

    slack: Callable[[], NDArray[np.int64]]  # [requests], by how much `computed` may be too high
    positions: Callable[[], Tensor]  # integers [num_tokens] on the device


class StepBatch(NamedTuple):
    """The batch of one step, in the order of its rows; a request's rows are neighbours."""

    request_ids: Sequence[str]
    scheduled: NDArray[np.int32]  # [requests], number of tokens of each in this step
    computed: NDArray[np.int32]  # [requests], position of each one's first row in this step
    num_tokens: int  # sum of `scheduled`; later rows are padding
    token_ids: Callable[[], Tensor]  # int32 [num_tokens] on the device
    unknown: UnknownPositions | None = None  # None if `computed` is exact
    drafts: NDArray[np.int64] | None = None  # [requests], those among each one's tokens, the last
