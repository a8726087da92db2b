"""What a capture loads: bytes of a token, and how much of each thing the model's pace needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from midstream.codecs import Codec, Rp8, Topk8
from midstream.errors import SpecError
from midstream.store.format.entry import Header
from midstream.store.format.layout import BLOCK, Group, Layout, group_bytes
from midstream.store.format.lines import Line
from midstream.store.writer import SHARD_BYTES
from midstream.tools.capacity.job import PlannedJob, ranks
from midstream.tools.capacity.rates import (
    ASSUMED,
    DERIVED,
    GIVEN,
    Figure,
    Rates,
    encoder_rate,
    flops_of,
    row_seconds,
)
from midstream.version import __version__

# What `midstream capture` keeps of a request beside its rows, as JSON: terms, plan, receipt. A test
# compares it with a store that was written.
METADATA_BYTES = 600
MEASURED_TAPS = 32  # of the figures for the host
STAGING_SHARE = 16  # of a GPU's memory: the ring's default is no more than that part

COMPUTE = "compute"
ENCODING = "encoding on the device"
BUS = "bus to the host"
STEP = "host, around a step"
FRONT_END = "front end"
WRITER = "store writer"
NETWORK = "network"
STORE = "store"


@dataclass(frozen=True, slots=True)
class Resource:
    """One thing that a capture needs.

    Attributes:
        name: which.
        where: one of what there is: "busiest rank", "engine", "machine", "all".
        share: how much of it is needed for as many tokens as the model computes where nothing is
            captured; above 1 it holds the job back.
        needed, available: bytes/s at that speed, and what there is; None for what is time.
        basis: of `available`: measured, derived, assumed, given.
    """

    name: str
    where: str
    share: float
    needed: float | None
    available: float | None
    basis: str


@dataclass(frozen=True, slots=True)
class Load:
    """A job with one codec and layout.

    Attributes:
        codec: its spec.
        returned: gathered or sharded.
        row_bytes: of one encoded row.
        rows: of a token: how many, on average.
        token_bytes: of a token's rows, on average.
        stored_bytes: of a token, with all that the store adds.
        rank_bytes: of a token, by stage and rank: what each of an engine's GPUs moves.
        ring_bytes: that one full step takes of the fullest rank's ring, before encoding.
        resources: all that is needed; the first that gives out is `first`.
        engine: tokens/s of one engine, if nothing were captured.
        row: seconds that a row adds to its engine's call.
        encoder: bytes/s of vectors that a device encodes; None: they are not encoded.
        engines, gpus: how many there are, and of how many GPUs each is.
        tokens: of the whole job.
    """

    codec: str
    returned: str
    row_bytes: int
    rows: float
    token_bytes: float
    stored_bytes: float
    rank_bytes: tuple[tuple[float, ...], ...]
    ring_bytes: int
    resources: tuple[Resource, ...]
    engine: Figure
    row: Figure
    encoder: Figure | None
    engines: int
    gpus: int
    tokens: int

    @property
    def model_rate(self) -> float:
        """Tokens/s of all engines, if nothing were captured."""
        return self.engine.value * self.engines

    @property
    def first(self) -> Resource:
        """What saturates first."""
        return max(self.resources, key=lambda one: one.share)

    @property
    def rate(self) -> float:
        """Tokens/s of all engines: what the first to saturate leaves."""
        return self.model_rate / self.first.share

    @property
    def seconds(self) -> float:
        """How long the job takes."""
        return self.tokens / self.rate

    @property
    def total_bytes(self) -> float:
        """Of the store, in the end."""
        return self.stored_bytes * self.tokens

    def resource(self, name: str) -> Resource:
        """One of the resources.

        Raises:
            KeyError: it is not one of this job's.
        """
        for one in self.resources:
            if one.name == name:
                return one
        raise KeyError(name)


def engine_rate(job: PlannedJob, rates: Rates) -> Figure:
    """Tokens/s of one engine that captures nothing: as given, or by its FLOP/s.

    Raises:
        SpecError: the model's kind is not known here, so that it must be given.
    """
    if rates.engine is not None:
        return rates.engine
    flops = flops_of(job.size, job.request_tokens)
    if flops is None or job.size.weights is None:
        raise SpecError(
            "tokens_per_second",
            f"how many weights {job.size.name} has cannot be told from its configuration, so its "
            "speed cannot be estimated; say how many prompt tokens one engine computes in a second",
        )
    gpus = job.fleet.gpus
    efficiency = rates.efficiency.value if gpus > 1 else 1.0
    value = rates.gpu_flops.value * gpus * efficiency / flops
    assumed = gpus > 1 and rates.efficiency.basis == ASSUMED
    if assumed or job.size.weights.has_experts:
        basis = ASSUMED
    else:
        basis = GIVEN if rates.gpu_flops.basis == GIVEN else DERIVED
    source = (
        f"{rates.gpu_flops.value / 1e12:,.0f} TFLOP/s a GPU × {gpus}"
        + (f" × {efficiency:g}" if gpus > 1 else "")
        + f", {flops / 1e9:,.1f} GFLOP a token"
    )
    return Figure(value, basis, source)


def load_of(job: PlannedJob, codec: Codec, returned: str, rates: Rates) -> Load:
    """What a job needs with a codec and a layout.

    Args:
        job: what is planned.
        codec: how rows are encoded.
        returned: gathered or sharded.
        rates: what there is.

    Raises:
        SpecError: the codec cannot write vectors so short, or the model's speed is not known.
    """
    size, fleet = job.size, job.fleet
    row_bytes = codec.row_bytes(size.hidden_size, getattr(torch, size.dtype))
    by_rank = [ranks(taps, fleet.tp, returned) for taps in job.taps_of_stages()]
    rank_bytes = tuple(
        tuple(taps * row_bytes * job.fraction for taps in stage) for stage in by_rank
    )
    most = max(max(stage) for stage in by_rank)
    token_bytes = len(job.taps) * row_bytes * job.fraction
    name, k = codec.spec.partition(":")[0], codec.k if isinstance(codec, Rp8 | Topk8) else 0
    costs = _Costs(
        engine_rate(job, rates), row_seconds(name, size.vector_bytes, k), encoder_rate(name, k)
    )
    stored = stored_bytes(job, codec)
    busiest = _Busiest(job, most, most * row_bytes * job.fraction, token_bytes, stored)
    return Load(
        codec=codec.spec,
        returned=returned,
        row_bytes=row_bytes,
        rows=len(job.taps) * job.fraction,
        token_bytes=token_bytes,
        stored_bytes=stored,
        rank_bytes=rank_bytes,
        ring_bytes=most * size.vector_bytes * job.step_tokens,
        resources=tuple(_resources(busiest, costs, rates)),
        engine=costs.engine,
        row=costs.row,
        encoder=costs.encoder,
        engines=fleet.engines,
        gpus=fleet.gpus,
        tokens=job.tokens,
    )


def stored_bytes(job: PlannedJob, codec: Codec) -> float:
    """Bytes that the store takes for a token, on average: its rows, its index, its part of what is
    written once for a request and once for a shard, and the checksums.
    """
    size = job.size
    header = Header(
        model=size.name[-1024:],
        revision="",
        hidden_size=size.hidden_size,
        dtype=size.dtype,
        codec=codec.spec,
        vllm="0.00.0",
        midstream=__version__,
    )
    # Where fewer than one token of a request is kept, on average, only some requests are stored.
    some = min(1.0, job.request_tokens * job.fraction)
    kept = job.request_tokens * job.fraction / some
    line = Line(
        "000000000-0123456789abcdef", 0, "", job.request_tokens, ((0, int(kept)),), METADATA_BYTES
    )
    request = kept * group_bytes(Group(job.taps, 1), header.row_bytes)
    request += len(line.emit()) + METADATA_BYTES
    requests = max(1.0, SHARD_BYTES / request)
    group = Group(job.taps, int(requests * kept))
    head = len(Layout(header, (group,), 1 << 16, 1 << 20).head())
    shard = requests * request * (1 + 4 / BLOCK) + head
    return shard / requests / job.request_tokens * some


@dataclass(frozen=True, slots=True)
class _Busiest:
    """What passes where most of it passes, of a token.

    Attributes:
        job: what is planned.
        taps: of the rank that moves most of them.
        rank_bytes: of that rank's rows.
        token_bytes: of all rows.
        stored_bytes: as the store takes them.
    """

    job: PlannedJob
    taps: int
    rank_bytes: float
    token_bytes: float
    stored_bytes: float


@dataclass(frozen=True, slots=True)
class _Costs:
    """What the device takes: see `Load`."""

    engine: Figure
    row: Figure
    encoder: Figure | None


def _resources(one: _Busiest, costs: _Costs, rates: Rates) -> list[Resource]:
    job, fleet, speed = one.job, one.job.fleet, costs.engine.value
    rows = one.taps * job.fraction
    slower = 1 + speed * rows * costs.row.value
    found = [Resource(COMPUTE, "engine", slower, None, None, costs.engine.basis)]

    def bytes_through(name: str, where: str, nbytes: float, available: Figure) -> None:
        needed, most = nbytes * speed, available.value
        found.append(Resource(name, where, needed / most, needed, most, available.basis))

    def time_of(name: str, where: str, seconds: float, basis: str) -> None:
        found.append(Resource(name, where, seconds * speed, None, None, basis))

    if costs.encoder is not None:
        vectors = rows * job.size.vector_bytes
        bytes_through(ENCODING, "busiest rank", vectors, costs.encoder)
    bytes_through(BUS, "busiest rank", one.rank_bytes, rates.bus)
    wider = max(1.0, len(job.taps) / MEASURED_TAPS)
    time_of(STEP, "worker", rates.step.value * wider / job.step_tokens, rates.step.basis)
    # One process: it puts results together, and what is stored passes through it.
    asked = rates.request.value * wider / job.request_tokens
    time_of(FRONT_END, "engine", asked + one.token_bytes / rates.reader.value, rates.request.basis)
    bytes_through(WRITER, "engine", one.stored_bytes, rates.writer)
    leaving = one.stored_bytes * fleet.engines_of_a_node
    if fleet.spans_nodes:
        # Between stages vLLM hands on the stream as two tensors.
        leaving += 2 * job.size.vector_bytes
    bytes_through(NETWORK, "machine", leaving, rates.network)
    bytes_through(STORE, "all", one.stored_bytes * fleet.engines, rates.store)
    return found
