"""How a job is spread over a Ray cluster: how many engines, and what each of them takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.jobs.job import Job
from midstream.validation import is_int, kind, show

AUTO = "auto"
LOCAL = "local"

# Lines in a chunk at most: what is lost with an engine is what was not in the store of its chunks.
_CHUNK = 64
# Chunks that each engine gets at least of a data set that is short.
_CHUNKS_EACH = 4
# Lines on their way at once, in how many engines run together: half of them in the engine, and as
# many that wait for it, or for their shard.
_ON_THEIR_WAY = 4
_SEQUENCES = 256  # vLLM's max_num_seqs, where nobody sets it


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where engines run, and how many.

    Attributes:
        address: of the cluster, as `host:port`; `auto`: that of RAY_ADDRESS or of the cluster that
            runs on this machine, and where there is none a new one of this machine alone, which
            ends with the job; `local`: always such a new one. A process that is connected to Ray
            already stays with that.
        engines: how many; None: as many as the cluster has room for.
        cpus: CPU cores for each. On a CPU its threads are as many.
        gpus: GPUs for each; None: one for each rank where the cluster has GPUs, otherwise none.
        log: whether what engines print is printed here.

    Raises:
        SpecError: a field is malformed; its path is `ray.` and the field.
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
                f"{self.address}: Ray's client cannot do this; run on a machine of the cluster, "
                "and give the address as host:port",
            )
        if self.engines is not None:
            if not is_int(self.engines):
                raise SpecError("ray.engines", f"expected `int`, got {kind(self.engines)}")
            if self.engines < 1:
                raise SpecError("ray.engines", f"expected at least 1, got {self.engines}")
        for name in ("cpus", "gpus"):
            value = getattr(self, name)
            if value is None and name == "gpus":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise SpecError(f"ray.{name}", f"expected a number from 0, got {show(value)}")

    def settle(self, job: Job, machines: Iterable[Mapping[str, float]]) -> Layout:
        """What it comes to on a cluster.

        Args:
            job: whose engines these are; the ranks of one are all on one machine.
            machines: of each the resources that Ray counts, `CPU` and `GPU` among them.

        Raises:
            SpecError: no machine has room for one engine; or the job's engines are no single ones.
        """
        machines = list(machines)
        ranks = _ranks(job)
        gpus = self.gpus
        if gpus is None:
            gpus = float(ranks if any(each.get("GPU", 0) for each in machines) else 0)
        room = sum(_fitting(each, self.cpus, gpus) for each in machines)
        if not room:
            most = ", ".join(
                f"{each.get('CPU', 0):g} CPUs and {each.get('GPU', 0):g} GPUs" for each in machines
            )
            raise SpecError(
                "ray",
                f"an engine needs {self.cpus:g} CPUs and {gpus:g} GPUs of one machine, and those "
                f"of the cluster have {most or 'nothing'}; see `engine_args`, and what each engine "
                "is to take",
            )
        if self.engines is not None and self.engines > room:
            raise SpecError(
                "ray.engines",
                f"expected at most {room}, for which the cluster has room, got {self.engines}",
            )
        return Layout(self.engines or room, self.cpus, gpus)


@dataclass(frozen=True, slots=True)
class Layout:
    """How many engines there are, and what each takes.

    Attributes:
        engines: how many.
        cpus: cores for each.
        gpus: for each.
    """

    engines: int
    cpus: float
    gpus: float

    def chunk_lines(self, lines: int | None) -> int:
        """How many lines a chunk has, where so many are left to do; None: nobody knows."""
        if lines is None:
            return _CHUNK
        return min(_CHUNK, max(1, -(-lines // (_CHUNKS_EACH * self.engines))))

    def chunks_each(self, job: Job, chunk_lines: int) -> int:
        """How many chunks an engine has at once."""
        sequences = job.engine_args.get("max_num_seqs") or _SEQUENCES
        return max(2, -(-_ON_THEIR_WAY * int(sequences) // chunk_lines))


def _ranks(job: Job) -> int:
    arguments: Mapping[str, Any] = job.engine_args
    if arguments.get("data_parallel_size", 1) not in (1, None):
        raise SpecError(
            "engine_args.data_parallel_size",
            "on Ray there are as many engines as are asked for; leave it out",
        )
    ranks = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        value = arguments.get(name, 1)
        if not is_int(value) or value < 1:
            raise SpecError(f"engine_args.{name}", f"expected a number from 1, got {show(value)}")
        ranks *= int(value)
    return ranks


def _fitting(machine: Mapping[str, float], cpus: float, gpus: float) -> int:
    """How many engines a machine has room for; one that takes nothing is counted once."""
    found = [
        int(machine.get(name, 0) // wanted)
        for name, wanted in (("CPU", cpus), ("GPU", gpus))
        if wanted
    ]
    return min(found, default=1)
