"""Placement of a job's engines on a Ray cluster: their number and resources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.lab.jobs.job import Job
from midstream.validation import at, is_int, read_count, show

AUTO = "auto"
LOCAL = "local"

# Largest number of lines in a chunk. If an engine dies, the unstored lines of its chunks are lost.
_CHUNK = 64
# Least number of chunks per engine for a short dataset.
_CHUNKS_EACH = 4
# Unfinished lines per engine, in multiples of its batch size: half in the engine, the rest waiting
# for the engine or for their shard.
_WINDOW_BATCHES = 4
# vLLM's default of max_num_seqs.
_SEQUENCES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where engines run, and how many.

    Attributes:
        address: address of the cluster, as `host:port`. `auto`: the address in RAY_ADDRESS, or the
            cluster running on this machine, or else a new cluster of this machine that ends with
            the job. `local`: always a new cluster. A process that is already connected to Ray keeps
            its connection.
        engines: number of engines; None: as many as fit the cluster.
        cpus: CPU cores per engine; also its number of threads on a CPU.
        gpus: GPUs per engine; None: one per rank if the cluster has GPUs, otherwise none.
    """

    address: str = AUTO
    engines: int | None = None
    cpus: float = 1
    gpus: float | None = None
    log: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not self.address:
            raise SpecError("ray.address", f"expected an address, got {show(self.address)}")
        if self.address.startswith("ray://"):
            raise SpecError(
                "ray.address",
                f"{self.address}: addresses of Ray Client are unsupported; run on a machine of the "
                "cluster and pass the address as host:port",
            )
        if self.engines is not None:
            with at("ray.engines"):
                read_count(self.engines)
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if value is None and name == "gpus":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise SpecError(
                    f"ray.{name}", f"expected a number of at least 0, got {show(value)}"
                )

    def resolve(self, job: Job, machines: Iterable[Mapping[str, float]]) -> EngineLayout:
        """Return the number of engines and their resources on a cluster.

        Args:
            job: the job. All ranks of an engine are on one machine.
            machines: Ray's resources of each machine, including `CPU` and `GPU`.
        """
        machines = list(machines)
        ranks = _ranks(job)
        gpus = self.gpus
        if gpus is None:
            gpus = float(ranks if any(machine.get("GPU", 0) for machine in machines) else 0)
        capacity = sum(_fitting(machine, self.cpus, gpus) for machine in machines)
        if not capacity:
            available = ", ".join(
                f"{machine.get('CPU', 0):g} CPUs and {machine.get('GPU', 0):g} GPUs"
                for machine in machines
            )
            raise SpecError(
                "ray",
                f"an engine needs {self.cpus:g} CPUs and {gpus:g} GPUs of one machine, but the "
                f"cluster's machines have {available or 'nothing'}; change `engine_args` or the "
                "resources of each engine",
            )
        if self.engines is not None and self.engines > capacity:
            raise SpecError(
                "ray.engines",
                f"expected at most {capacity}, which the cluster has resources for, got "
                f"{self.engines}",
            )
        return EngineLayout(self.engines or capacity, self.cpus, gpus)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Number and resources of a job's engines."""

    engines: int
    cpus: float
    gpus: float

    def chunk_lines(self, lines: int | None) -> int:
        """Return the number of lines per chunk for this many remaining lines; None: unknown."""
        if lines is None:
            return _CHUNK
        return min(_CHUNK, max(1, -(-lines // (_CHUNKS_EACH * self.engines))))

    def chunks_each(self, job: Job, chunk_lines: int) -> int:
        sequences = job.engine_args.get("max_num_seqs") or _SEQUENCES
        return max(2, -(-_WINDOW_BATCHES * int(sequences) // chunk_lines))


def _ranks(job: Job) -> int:
    arguments: Mapping[str, Any] = job.engine_args
    if arguments.get("data_parallel_size", 1) not in (1, None):
        raise SpecError(
            "engine_args.data_parallel_size",
            "on Ray, leave it out and set the number of engines instead",
        )
    ranks = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        value = arguments.get(name, 1)
        if not is_int(value) or value < 1:
            raise SpecError(
                f"engine_args.{name}", f"expected an integer of at least 1, got {show(value)}"
            )
        ranks *= int(value)
    return ranks


def _fitting(machine: Mapping[str, float], cpus: float, gpus: float) -> int:
    """Return how many engines fit a machine; 1 if an engine needs no resources."""
    counts = [
        int(machine.get(name, 0) // wanted)
        for name, wanted in (("CPU", cpus), ("GPU", gpus))
        if wanted
    ]
    return min(counts, default=1)
