"""Fake engines for jobs on Ray, imported by the processes of actors."""

import os
import time
from pathlib import Path

import ray
from lab.jobs.fakes import FakeEngine

RAY = {
    "num_cpus": 2,
    "include_dashboard": False,
    "log_to_driver": False,
    "logging_level": "ERROR",
}


class Slow(FakeEngine):
    """A slow engine, which appends its process id to the file `pids` in the folder of the data."""

    def __init__(self, job) -> None:
        super().__init__(job, seed=os.getpid())
        with open(Path(job.data).parent / "pids", "a") as file:
            file.write(f"{os.getpid()}\n")

    def step(self):
        time.sleep(0.02)
        return super().step()


def start_ray() -> None:
    """Start a cluster with two cores on this machine, and connect this process to it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init("local", **RAY)
