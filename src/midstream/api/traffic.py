"""What an engine does besides the runs that ordinary requests go before."""

from __future__ import annotations

from dataclasses import dataclass

RUN_ID = "sweep-"
"""Beginning of the ids of requests that ordinary ones go before: those of sweeps and of fits."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an engine does besides the runs of sweeps and fits.

    Attributes:
        requests: number of unfinished requests that are no runs of sweeps or fits.
        starting: of these, the number that have no token yet.
        waiting: number of all requests, also of sweeps, that wait for capacity for their plans.
        seats: number of requests that the engine computes at the same time.
    """

    requests: int
    starting: int
    waiting: int
    seats: int
