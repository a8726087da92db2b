"""Interface between the runtime, which captures rows, and the transports that copy them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from midstream.codecs import RowEncoding
from midstream.transport.arena import Extent


class Parcel(NamedTuple):
    """Consecutive units of the ring that share an encoding."""

    first: int  # the first unit
    num_units: int
    nbytes: int  # when encoded
    encoding: RowEncoding
    encoded: Tensor | None = None  # uint8 [rows, row_bytes]; None: the transport encodes the units


class HostScores(NamedTuple):
    """Scores of consecutive tokens, in memory that others may share."""

    memory: Tensor  # float32 [rows, slots]
    first: int  # row of the first token
    size: int  # number of tokens

    @property
    def values(self) -> Tensor:
        """The scores, [size, slots]."""
        return self.memory[self.first : self.first + self.size]


class Shipment(Protocol):
    """The results of one step during their copy to host memory."""

    @property
    def extents(self) -> tuple[Extent | None, ...]:
        """Destination of each parcel's encoded, consecutive rows; None if they were dropped."""

    def ready(self) -> bool:
        """Whether the copy is complete."""

    def wait(self) -> None:
        """Block until the copy is complete."""

    def tally(self) -> Tensor:
        """Return the tally on the host, int32 [tokens, 4], until `free_staging`. Blocks."""

    def free_staging(self) -> None:
        """Let a later shipment use the memory of the tally; scores stay. Blocks. Called once."""

    def scores(self) -> HostScores:
        """Return the scores on the host. Blocks."""


class Copy(Protocol):
    """A small tensor during its copy to host memory."""

    def values(self) -> Tensor:
        """Return the tensor on the host. Blocks until this copy is complete, not later ones."""


class Transport(Protocol):
    """Owner of the staging ring."""

    @property
    def capacity(self) -> int:
        """Maximum units of the ring per step."""

    def reserve(self, num_units: int) -> int:
        """Reserve units for the next forward, which waits for their copy; return the first."""

    def copy(self, values: Tensor) -> Copy:
        """Queue a copy of a tensor, which later work may overwrite, without blocking."""

    def ship(self, parcels: list[Parcel], tally: Tensor, scores: Tensor) -> Shipment:
        """Queue the copy of parcels, tally and scores after a forward, without blocking."""
