"""The narrow interface between the runtime, which captures, and whatever moves the rows."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Shipment(Protocol):
    """Rows of one step on their way to host memory."""

    def ready(self) -> bool:
        """Whether `rows` and `tally` would not wait."""
        ...

    def rows(self) -> Tensor:
        """[rows, H] on the host, in the order of the step's records. Waits until they are there."""
        ...

    def tally(self) -> Tensor:
        """int32 [tokens, 4] on the host: what the device did, see `midstream.ops.layout`."""
        ...

    def scores(self) -> Tensor:
        """float32 [tokens, slots] on the host; [0, slots] where none were shipped. Waits."""
        ...


class Copy(Protocol):
    """A small tensor on its way to host memory."""

    def values(self) -> Tensor:
        """It, on the host. Waits until it is there, and for nothing that was queued later."""
        ...


class Transport(Protocol):
    """Owner of the staging ring."""

    @property
    def capacity(self) -> int:
        """Rows that one step may capture."""
        ...

    def reserve(self, num_rows: int) -> int:
        """The ring's first row for the next forward, which may write `num_rows` from there.

        Work queued on the current stream afterwards waits until what was there has left.
        """
        ...

    def copy(self, values: Tensor) -> Copy:
        """Sends a tensor on its way as it is at this place of the current stream; returns at once.
        It may be overwritten by what is queued afterwards.
        """
        ...

    def ship(self, first: int, num_rows: int, tally: Tensor, scores: Tensor) -> Shipment:
        """Sends the ring's rows [first, first + num_rows), the step's tally and its scores on
        their way.

        Called after the forward was queued; returns at once.
        """
        ...
