"""What tensor-parallel ranks tell each other: whether all can run a request, and scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from midstream.runtime.protocol.segments import WHOLE, RankShare
from midstream.runtime.worker.rank_check import RankChecksum

# Returns whether all ranks that run the same requests say yes.
Agree = Callable[[bool], bool]
# Returns the sum of all ranks' values, of the same shape; each rank must call it.
SumOverRanks = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class RankLinks:
    """A rank among those that run the same requests."""

    share: RankShare = WHOLE
    checksum: RankChecksum | None = None  # None if ranks are not compared
    agree: Agree | None = None  # asks other ranks whether they can run a plan with joint work
    add_up: SumOverRanks | None = None


ALONE = RankLinks()


def is_joint(plan: bytes) -> bool:
    """Return whether a plan's bytes, which all ranks have, may ask for logits or lenses."""
    return b"logits_" in plan or b"lens" in plan


def all_ranks(mine: bool) -> bool:
    """Return whether all tensor-parallel ranks say yes. Blocks the host until each called."""
    from vllm.distributed.parallel_state import get_tp_group

    said = torch.tensor([mine], dtype=torch.int32)
    torch.distributed.all_reduce(
        said, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group
    )
    return bool(said)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum over all tensor-parallel ranks, on the current stream; each must call."""
    from vllm.distributed.parallel_state import get_tp_group

    total: Tensor = get_tp_group().all_reduce(values)
    return total
