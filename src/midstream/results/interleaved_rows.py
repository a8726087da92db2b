"""Rows of one site and layer that lie in memory between those of others of the same request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class InterleavedRows(Tensor):
    """A view of some rows that leaves the process as a copy of these alone."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def alone(self) -> Tensor:
        """Return a copy with a storage of its own."""
        copy = self.detach().clone(memory_format=torch.contiguous_format)
        return copy.requires_grad_(self.requires_grad)

    def share_memory_(self) -> InterleavedRows:
        """Move these rows, without the others of the storage, to shared memory."""
        self.data = self.alone().data.share_memory_()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.alone().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = copy = self.alone()
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))


def interleaved(rows: Tensor) -> Tensor:
    """Return rows as a tensor that leaves the process without others of its storage."""
    if rows.untyped_storage().nbytes() == rows.nbytes:
        return rows
    return rows.as_subclass(InterleavedRows)


def mark_interleaved(views: Sequence[Tensor]) -> None:
    """Turn views that only the caller refers to, of one storage, into `InterleavedRows`."""
    if views and views[0].untyped_storage().nbytes() != views[0].nbytes:
        for view in views:
            # A third of the time of `as_subclass`, which makes another view.
            view.__class__ = InterleavedRows
