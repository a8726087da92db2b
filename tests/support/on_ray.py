"""Fake engines for jobs on Ray, imported by the processes of actors."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import ray
from unit.jobs.fakes import FakeEngine

RAY = {
    "num_cpus": 2,
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "ERROR",
}


class Slow(FakeEngine):
    """Takes its time, and notes in the file `pids` beside the data which process it is in."""

    def __init__(self, job) -> None:
        super().__init__(job, seed=os.getpid())
        with open(Path(job.data).parent / "pids", "a") as file:
            file.write(f"{os.getpid()}\n")

    def step(self):
        time.sleep(0.02)
        return super().step()


class Deadly(Slow):
    """Its process is killed by a prompt that says so, when the engine would have ended it."""

    def _end(self, record):
        if "kills" in json.dumps(record.prompt):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._end(record)


class Elsewhere(Slow):
    """Its process sees another directory of the job's name."""


class Refused(FakeEngine):
    """Cannot start for what is asked."""

    def __init__(self, job) -> None:
        from midstream import SpecError

        raise SpecError("model", "there is no folder 'some/model'")


class Hopeless(FakeEngine):
    """Its process is killed whatever it runs."""

    def step(self):
        os.kill(os.getpid(), signal.SIGKILL)
        return []


def pids(folder: Path) -> list[int]:
    """Of the processes that had a `Slow`, in the order in which these were started."""
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def start_ray() -> None:
    """A cluster of two cores of this machine, which this process is connected to."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", **RAY)
