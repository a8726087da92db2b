"""The narrow interface between the runtime, which captures, and whatever moves the rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from midstream.codecs import Codec
from midstream.transport.arena import Extent


@dataclass(frozen=True, slots=True)
class Parcel:
    """Consecutive rows of the ring, all of one codec."""

    first: int
    num_rows: int
    codec: Codec


class Shipment(Protocol):
    """What came of one step, on its way to host memory."""

    @property
    def extents(self) -> tuple[Extent | None, ...]:
        """Where each parcel's rows come, encoded, one after the other; None: they were dropped."""
        ...

    def ready(self) -> bool:
        """Whether all of it is there."""
        ...

    def wait(self) -> None:
        """Waits until all of it is there."""
        ...

    def tally(self) -> Tensor:
        """int32 [tokens, 4] on the host: what the device did, see `midstream.ops.layout`. Waits."""
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

    def ship(self, parcels: list[Parcel], tally: Tensor, scores: Tensor) -> Shipment:
        """Sends rows of the ring, the step's tally and its scores on their way.

        Called after the forward was queued; returns at once. The rows' extents have one user.

        Raises:
            OSError: there is no room on the disk for what is beyond the arena.
        """
        ...
