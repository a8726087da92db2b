"""How much memory the rows of requests take until they are fetched, as the front end reckons it.

With `overflow="block"` a request goes to the engine only when all rows that it may capture have
room, so that no step ever waits for a reader.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from midstream.codecs import parse_codec
from midstream.config import Config
from midstream.errors import SpecError
from midstream.runtime.budget import Need, RowRoom
from midstream.runtime.requests import Share
from midstream.runtime.workers import MOST_HELD, Worker
from midstream.spec import ResolvedPlan
from midstream.spec.range_algebra import overlay


def row_room(workers: Sequence[Worker], config: Config) -> RowRoom:
    """The room of an engine, over all pipeline stages. Of the ranks of a stage the first counts: no
    other moves more.
    """
    capturing = [worker for worker in workers if worker.description["tensor_rank"] == 0]
    if config.overflow != "block":
        return RowRoom(None, lambda: 0)
    return RowRoom(
        sum(worker.description["arena_bytes"] for worker in capturing),
        lambda: sum(worker.held for worker in capturing),
    )


def most_rows(plan: ResolvedPlan, hidden: int, dtype: torch.dtype, length: int, ranks: int) -> int:
    """Bytes of the rows that a plan can capture; where ranks share them, those of the first.

    Args:
        plan: what one completion asks for.
        hidden: width of the model.
        dtype: the dtype that it computes in.
        length: how many tokens the request can have.
        ranks: how many there are in a tensor-parallel group.
    """
    if not plan.captures:
        return 0
    width = parse_codec(plan.codec).row_bytes(hidden, dtype)
    first = Share(0, ranks)
    rows = 0
    for start, stop, indices in overlay([each.where.possible for each in plan.captures]):
        taps = tuple({tap for nth in indices for tap in plan.captures[nth].taps})
        positions = max(0, (length if stop is None else min(stop, length)) - start)
        rows += len(first.of(taps, plan.sharded)) * positions
    return rows * width


def check_rows(need: Need, room: RowRoom) -> None:
    """Whether a request ever has room.

    Raises:
        SpecError: it has not.
    """
    # What readers hold on to may take the other part.
    limit = None if room.limit is None else int(room.limit * (1 - MOST_HELD))
    if limit is not None and need.rows > limit:
        raise SpecError(
            "capture",
            f"the rows may take {need.rows} bytes, and one request has room for {limit}; capture "
            "fewer layers or positions, lower max_tokens, raise midstream's setting arena_bytes, "
            'or let rows that do not fit go to the disk with overflow="spill"',
        )
