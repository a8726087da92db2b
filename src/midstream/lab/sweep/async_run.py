"""The runs of a sweep on an asynchronous engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from midstream.deadlines import all_of
from midstream.lab.sweep.cells import SweepCell
from midstream.lab.sweep.job import SweepJob, SweepRun
from midstream.lab.sweep.result import Sweep

# Called with each cell and its value, as soon as it is known.
OnCell = Callable[[SweepCell, float], object]
# Called once, with the sweep's job, when its unpatched runs are known.
OnStart = Callable[[SweepJob], object]
# Returns a context that is entered before each run, which may wait there, and left after it. Its
# value is arguments of vLLM's `generate` for that run; None: there are none.
Turn = Callable[[], AbstractAsyncContextManager[Mapping[str, Any] | None]]


async def run_job(
    job: SweepJob,
    output_of: Callable[[SweepRun, Mapping[str, Any]], Awaitable[Any]],
    at_once: int,
    on_start: OnStart | None = None,
    on_cell: OnCell | None = None,
    turn: Turn = nullcontext,
) -> Sweep:
    """Carry out a sweep. If one run fails, or the caller is cancelled, the others are cancelled."""

    async def output(run: SweepRun) -> Any:
        async with turn() as more:
            return await output_of(run, more or {})

    job.begin(await all_of(output(run) for run in job.first_runs()))
    if on_start is not None:
        on_start(job)
    runs = iter(job.runs())

    async def work() -> None:
        for run in runs:
            value = job.add(run, await output(run))
            if on_cell is not None and run.cell is not None:
                on_cell(run.cell, value)

    await all_of(work() for _ in range(at_once))
    return job.result()
