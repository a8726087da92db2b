"""Interface between the runtime, which captures rows, and the transports that copy them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from midstream.codecs import RowEncoding
from midstream.transport.arena import Extent


@dataclass(frozen=True, slots=True)
class Parcel:
    """Consecutive units of the ring that share an encoding.

    Attributes:
        first: the first unit.
        num_units: number of units.
        encoded: the encoded rows on the device or the host, uint8 [rows, row_bytes], if they are
            not made of the units alone; nobody else changes them. None: the transport encodes the
            units.
    """

    first: int
    num_units: int
    encoding: RowEncoding
    encoded: Tensor | None = None


class Shipment(Protocol):
    """The results of one step during their copy to host memory."""

    @property
    def extents(self) -> tuple[Extent | None, ...]:
        """Destination of each parcel's encoded, consecutive rows; None if they were dropped."""
        ...

    def ready(self) -> bool:
        """Whether the copy is complete."""
        ...

    def wait(self) -> None:
        """Block until the copy is complete."""
        ...

    def tally(self) -> Tensor:
        """Return the device's tally on the host, int32 [tokens, 4]; see `midstream.ops.layout`.

        Blocks until it is copied. Not valid after `free_tally`.
        """
        ...

    def free_tally(self) -> None:
        """Let a later shipment use the memory of the tally. Called at most once."""
        ...

    def scores(self) -> Tensor:
        """Return the scores on the host, float32 [tokens, slots]; [0, slots] if none were shipped.

        Blocks until they are copied.
        """
        ...


class Copy(Protocol):
    """A small tensor during its copy to host memory."""

    def values(self) -> Tensor:
        """Return the tensor on the host. Blocks until this copy is complete, not later ones."""
        ...


class Transport(Protocol):
    """Owner of the staging ring."""

    @property
    def capacity(self) -> int:
        """Maximum units of the ring per step."""
        ...

    def reserve(self, num_units: int) -> int:
        """Reserve consecutive units of the ring for the next forward; return the first.

        Work queued on the current stream afterwards waits until earlier contents of these units are
        copied.
        """
        ...

    def copy(self, values: Tensor) -> Copy:
        """Queue a copy of a tensor, as of this point of the current stream, without blocking.

        Work queued afterwards may overwrite the tensor.
        """
        ...

    def ship(self, parcels: list[Parcel], tally: Tensor, scores: Tensor) -> Shipment:
        """Queue the copy of units of the ring, of the step's tally and of its scores.

        Called after the forward was queued; does not block. Each extent has one user.
        """
        ...
