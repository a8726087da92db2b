"""What a model runner is about to compute, in the one form that the planner knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class UnknownPositions(NamedTuple):
    """What the host does not know yet: which of the last steps' drafted tokens were accepted.

    Attributes:
        slack: gives int64 [requests], by how much `StepBatch.computed` may be too high. It is
            never too low.
        positions: gives integers [num_tokens] on the device, the position of each row.
    """

    slack: Callable[[], NDArray[np.int64]]
    positions: Callable[[], Tensor]


class StepBatch(NamedTuple):
    """One step's batch, in the order of its rows.

    Attributes:
        request_ids: the engine's own ids, one per request in the batch.
        scheduled: int32 [requests], tokens of each in this step; the rows follow each other.
        computed: int32 [requests], tokens of each that were computed before: the position of its
            first row here.
        num_tokens: the sum of `scheduled`; rows beyond it are padding.
        token_ids: gives int32 [num_tokens] on the device, the id of each row's token.
        late: None where `computed` is exact.
    """

    request_ids: Sequence[str]
    scheduled: NDArray[np.int32]
    computed: NDArray[np.int32]
    num_tokens: int
    token_ids: Callable[[], Tensor]
    late: UnknownPositions | None = None
