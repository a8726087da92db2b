"""Fake engines for jobs on Ray, imported by the processes of actors."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import ray
from lab.jobs.fakes import FakeEngine

RAY = {
    "num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR",
}  # fmt: skip


class Slow(FakeEngine):
    """A slow engine, which appends its process id to the file `pids` in the folder of the data."""

    def __init__(self, job) -> None:
        super().__init__(job, seed=os.getpid())
        with open(Path(job.data).parent / "pids", "a") as file:
            file.write(f"{os.getpid()}\n")

    def step(self):
        time.sleep(0.02)
        return super().step()


class Deadly(Slow):
    """An engine whose process is killed when a prompt with the word "kills" ends."""

    def _end(self, record):
        if "kills" in json.dumps(record.prompt):
            os.kill(os.getpid(), signal.SIGKILL)
        return super()._end(record)


class Refused(FakeEngine):
    """An engine that rejects the job when it starts."""

    def __init__(self, job) -> None:
        from midstream import SpecError

        raise SpecError("model", "there is no folder 'some/model'")


class Hopeless(FakeEngine):
    """An engine whose process is killed in its first step."""

    def step(self):
        os.kill(os.getpid(), signal.SIGKILL)
        return []


def pids(folder: Path) -> list[int]:
    """Return the ids of the processes that had a `Slow`, in the order of their starts."""
    path = folder / "pids"
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def start_ray() -> None:
    """Start a cluster with two cores on this machine, and connect this process to it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", **RAY)
