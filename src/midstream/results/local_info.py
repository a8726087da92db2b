"""What a `Local` function is told about the rows that it gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LocalInfo:
    """The second argument of a `Local` function.

    Attributes:
        request_id: vLLM's id of the request in the engine, the same in all of its steps.
        site, layer: where the rows are read.
        positions: int64 [rows], the rows' positions in the request, ascending, on the host.
        token_ids: int64 [rows], the tokens there, on the rows' device.
    """

    request_id: str
    site: str
    layer: int
    positions: Tensor
    token_ids: Tensor
