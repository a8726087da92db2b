"""What an engine does besides the runs that ordinary requests go before."""

from __future__ import annotations

from dataclasses import dataclass

RUN_ID = "sweep-"
"""Beginning of the ids of requests that ordinary ones go before: those of sweeps and of fits."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an engine does besides the runs of sweeps and fits."""

    requests: int  # unfinished ones that are no runs of sweeps or fits
    starting: int  # of these, those that have no token yet
    waiting: int  # all requests, also of sweeps, that wait for capacity for their plans
    seats: int  # requests that the engine computes at the same time
