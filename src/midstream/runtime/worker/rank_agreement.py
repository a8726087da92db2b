"""What the ranks of a tensor-parallel group tell each other: whether all of them can run a request,
and parts of scores.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
