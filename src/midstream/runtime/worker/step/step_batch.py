"""The batch that a model runner computes next, in the form that the planner reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class UnknownPositions(NamedTuple):
    """What the host does not know yet: which draft tokens of the last steps were accepted.

    Attributes:
        slack: returns int64 [requests], by how much `StepBatch.computed` may be too high.
        positions: returns integers [num_tokens] on the device, the position of each row.
    """

    slack: Callable[[], NDArray[np.int64]]
    positions: Callable[[], Tensor]


class StepBatch(NamedTuple):
    """The batch of one step, in the order of its rows; a request's rows are neighbours.

    Attributes:
        scheduled: int32 [requests], number of tokens of each request in this step.
        computed: int32 [requests], position of each request's first row in this step.
        num_tokens: sum of `scheduled`; later rows are padding.
        token_ids: returns int32 [num_tokens] on the device, the id of each row's token.
        unknown: None if `computed` is exact.
        drafts: integers [requests], how many of each request's tokens, its last, are drafts.
    """

    request_ids: Sequence[str]
    scheduled: NDArray[np.int32]
    computed: NDArray[np.int32]
    num_tokens: int
    token_ids: Callable[[], Tensor]
    unknown: UnknownPositions | None = None
    drafts: NDArray[np.int64] | None = None
