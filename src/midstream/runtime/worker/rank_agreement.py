"""What the ranks of a tensor-parallel group tell each other: whether all of them can run a request,
and parts of scores.
"""

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
    """A rank among those that run the same requests.

    Attributes:
        share: the part of the captured vectors that this rank transfers.
        checksum: receives every plan and step; None if ranks are not compared.
        agree: asks the other ranks whether they can run a plan with work that all do together; None
            if there are none.
        add_up: sums values over the ranks; None: there is one.
    """

    share: RankShare = WHOLE
    checksum: RankChecksum | None = None
    agree: Agree | None = None
    add_up: SumOverRanks | None = None


ALONE = RankLinks()


def is_joint(plan: bytes) -> bool:
    """Return whether a packed plan has work that the ranks do together after a step, as logits and
    lenses are computed. True for some other plans too, of which nothing is lost by asking.

    It depends on the bytes alone, which every rank has, also a rank that cannot read the plan.
    """
    return b"logits_" in plan or b"lens" in plan


def all_ranks(mine: bool) -> bool:
    """Return whether all ranks of this rank's tensor-parallel group say yes; each of them must
    call this. Blocks until all have, on the host alone.
    """
    from vllm.distributed.parallel_state import get_tp_group

    said = torch.tensor([mine], dtype=torch.int32)
    torch.distributed.all_reduce(
        said, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group
    )
    return bool(said)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of the values of all ranks of this rank's tensor-parallel group; each of them
    must call this. Queued on the current stream, as vLLM's own sums are.
    """
    from vllm.distributed.parallel_state import get_tp_group

    total: Tensor = get_tp_group().all_reduce(values)
    return total
