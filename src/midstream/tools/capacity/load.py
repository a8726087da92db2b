"""Load of a capture job: bytes per token, and the utilisation of each resource."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from midstream.codecs import Cast, Codec, Rp8, Topk8
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

# Size of the JSON that `midstream capture` stores per request beside its rows: terms, plan and
# receipt. A test compares it with a written store.
METADATA_BYTES = 600
# Number of taps with which the host's rates were measured.
MEASURED_TAPS = 32
# The default staging ring takes at most 1 / STAGING_SHARE of a GPU's memory.
STAGING_SHARE = 16

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
    """Utilisation of one resource.

    Attributes:
        name: name of the resource.
        where: which instance is meant: "busiest rank", "engine", "machine", "all".
        share: utilisation at the model's speed without captures; a resource above 1 slows the job.
        needed, available: bytes/s needed at that speed, and available; None for processing time.
        basis: basis of `available`: measured, derived, assumed, given.
    """

    name: str
    where: str
    share: float
    needed: float | None
    available: float | None
    basis: str


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a job with one codec and layout. Values per token are averages.

    Attributes:
        codec: codec spec.
        returned: gathered or sharded.
        row_bytes: bytes of one encoded row; of sites of several widths, their mean.
        rows: rows per token.
        token_bytes: bytes per token of encoded rows.
        stored_bytes: bytes per token in the store, overhead included.
        rank_bytes: bytes per token that each GPU of an engine transfers, by stage and rank.
        ring_bytes: bytes of the fullest rank's staging ring that one full step takes, before
            encoding.
        resources: utilisation of every resource.
        engine: tokens/s of one engine without captures.
        row: seconds that one row adds to its engine's call.
        encoder: bytes/s of vectors that a device encodes; None: they are not encoded.
        engines, gpus: number of engines, and GPUs per engine.
        tokens: total number of tokens.
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
        """Tokens/s of all engines without captures."""
        return self.engine.value * self.engines

    @property
    def first(self) -> Resource:
        """The bottleneck: the resource with the highest utilisation."""
        return max(self.resources, key=lambda one: one.share)

    @property
    def rate(self) -> float:
        """Tokens/s of all engines with captures, limited by the bottleneck."""
        return self.model_rate / self.first.share

    @property
    def seconds(self) -> float:
        """Duration of the job in seconds."""
        return self.tokens / self.rate

    @property
    def total_bytes(self) -> float:
        """Final size of the store in bytes."""
        return self.stored_bytes * self.tokens

    def resource(self, name: str) -> Resource:
        """Return a resource by name.

        Raises:
            KeyError: the job does not use it.
        """
        for one in self.resources:
            if one.name == name:
                return one
        raise KeyError(name)


def engine_rate(job: PlannedJob, rates: Rates) -> Figure:
    """Return tokens/s of one engine without captures: as given, or estimated from FLOP/s.

    Raises:
        SpecError: the number of weights is unknown and no speed was given.
    """
    if rates.engine is not None:
        return rates.engine
    flops = flops_of(job.size, job.request_tokens)
    if flops is None or job.size.weights is None:
        raise SpecError(
            "tokens_per_second",
            f"required for {job.size.name}: its configuration does not determine the number of "
            "weights, so its speed cannot be estimated; pass the prompt tokens that one engine "
            "computes per second",
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
        f"{rates.gpu_flops.value / 1e12:,.0f} TFLOP/s per GPU × {gpus}"
        + (f" × {efficiency:g}" if gpus > 1 else "")
        + f", {flops / 1e9:,.1f} GFLOP per token"
    )
    return Figure(value, basis, source)


def load_of(job: PlannedJob, codec: Codec, returned: str, rates: Rates) -> Load:
    """Return the load of a job with one codec and layout.

    Args:
        job: the planned job.
        codec: codec of the rows.
        returned: gathered or sharded.
        rates: available rates.

    Raises:
        SpecError: the codec does not support vectors this short or split over ranks, or the model's
            speed is unknown.
    """
    size, fleet = job.size, job.fleet
    _check_codec(job, codec)
    widths = {size.width(tap) for tap in job.taps}
    by_rank = [ranks(size, taps, fleet.tp, returned) for taps in job.taps_of_stages()]
    every = widths.union(*(rank for stage in by_rank for rank in stage))
    bytes_of = {width: codec.row_bytes(width, getattr(torch, size.dtype)) for width in every}
    rank_bytes = tuple(
        tuple(sum(map(bytes_of.__getitem__, rank)) * job.fraction for rank in stage)
        for stage in by_rank
    )
    most = max((rank for stage in by_rank for rank in stage), key=sum)
    row_bytes = sum(bytes_of[size.width(tap)] for tap in job.taps) / len(job.taps)
    token_bytes = len(job.taps) * row_bytes * job.fraction
    name, k = codec.spec.partition(":")[0], codec.k if isinstance(codec, Rp8 | Topk8) else 0
    # `cast` has no measurement of its own: it does less than `full8`.
    name = "full8" if isinstance(codec, Cast) else name
    mean_bytes = round(sum(most) / max(1, len(most)) * size.itemsize)
    costs = _Costs(engine_rate(job, rates), row_seconds(name, mean_bytes, k), encoder_rate(name, k))
    stored = stored_bytes(job, codec)
    busiest = _Busiest(job, most, max(map(max, rank_bytes)), token_bytes, stored)
    return Load(
        codec=codec.spec,
        returned=returned,
        row_bytes=round(row_bytes),
        rows=len(job.taps) * job.fraction,
        token_bytes=token_bytes,
        stored_bytes=stored,
        rank_bytes=rank_bytes,
        ring_bytes=sum(most) * size.itemsize * job.step_tokens,
        resources=tuple(_resources(busiest, costs, rates)),
        engine=costs.engine,
        row=costs.row,
        encoder=costs.encoder,
        engines=fleet.engines,
        gpus=fleet.gpus,
        tokens=job.tokens,
    )


def _check_codec(job: PlannedJob, codec: Codec) -> None:
    for tap in job.taps:
        parts = job.size.parts(tap, job.fleet.tp)
        if parts > 1 and codec.spec != "raw":
            raise SpecError(
                "codec",
                f"{tap[0]} is split over {parts} ranks, so its vectors cannot be encoded by "
                f"{codec.spec}; use raw",
            )


def stored_bytes(job: PlannedJob, codec: Codec) -> float:
    """Return the average bytes per token in the store.

    Includes rows, index and checksums, and the token's part of what is written per request and per
    shard.
    """
    size = job.size
    header = Header(
        model=size.name[-1024:],
        revision="",
        hidden_size=size.hidden_size,
        widths=tuple(
            (tap, size.width(tap)) for tap in job.taps if size.width(tap) != size.hidden_size
        ),
        dtype=size.dtype,
        codec=codec.spec,
        vllm="0.00.0",
        midstream=__version__,
    )
    # If less than one token per request is kept on average, only some requests are stored.
    some = min(1.0, job.request_tokens * job.fraction)
    kept = job.request_tokens * job.fraction / some
    line = Line(
        "000000000-0123456789abcdef", 0, "", job.request_tokens, ((0, int(kept)),), METADATA_BYTES
    )
    request = kept * group_bytes(Group(job.taps, 1), header)
    request += len(line.emit()) + METADATA_BYTES
    requests = max(1.0, SHARD_BYTES / request)
    group = Group(job.taps, int(requests * kept))
    head = len(Layout(header, (group,), 1 << 16, 1 << 20).head())
    shard = requests * request * (1 + 4 / BLOCK) + head
    return shard / requests / job.request_tokens * some


@dataclass(frozen=True, slots=True)
class _Busiest:
    """Data volumes per token.

    Attributes:
        job: the planned job.
        widths: widths of the rows, or parts of rows, of the rank that transfers the most.
        rank_bytes: bytes per token of that rank's rows.
        token_bytes: bytes per token of all rows.
        stored_bytes: bytes per token in the store.
    """

    job: PlannedJob
    widths: Sequence[int]
    rank_bytes: float
    token_bytes: float
    stored_bytes: float


@dataclass(frozen=True, slots=True)
class _Costs:
    """Rates of the device; the attributes are those of `Load`."""

    engine: Figure
    row: Figure
    encoder: Figure | None


def _resources(one: _Busiest, costs: _Costs, rates: Rates) -> list[Resource]:
    job, fleet, speed = one.job, one.job.fleet, costs.engine.value
    rows = len(one.widths) * job.fraction
    slower = 1 + speed * rows * costs.row.value
    found = [Resource(COMPUTE, "engine", slower, None, None, costs.engine.basis)]

    def bytes_through(name: str, where: str, nbytes: float, available: Figure) -> None:
        needed, most = nbytes * speed, available.value
        found.append(Resource(name, where, needed / most, needed, most, available.basis))

    def time_of(name: str, where: str, seconds: float, basis: str) -> None:
        found.append(Resource(name, where, seconds * speed, None, None, basis))

    if costs.encoder is not None:
        vectors = sum(one.widths) * job.size.itemsize * job.fraction
        bytes_through(ENCODING, "busiest rank", vectors, costs.encoder)
    bytes_through(BUS, "busiest rank", one.rank_bytes, rates.bus)
    wider = max(1.0, len(job.taps) / MEASURED_TAPS)
    time_of(STEP, "worker", rates.step.value * wider / job.step_tokens, rates.step.basis)
    # A single process merges the results of an engine, and all stored rows pass through it.
    per_request = rates.request.value * wider / job.request_tokens
    reading = one.token_bytes / rates.reader.value
    time_of(FRONT_END, "engine", per_request + reading, rates.request.basis)
    bytes_through(WRITER, "engine", one.stored_bytes, rates.writer)
    outgoing = one.stored_bytes * fleet.engines_of_a_node
    if fleet.spans_nodes:
        # Between pipeline stages, vLLM sends the residual stream as two tensors.
        outgoing += 2 * job.size.vector_bytes
    bytes_through(NETWORK, "machine", outgoing, rates.network)
    bytes_through(STORE, "all", one.stored_bytes * fleet.engines, rates.store)
    return found
