"""Rates that capacity estimates use: measured, derived, assumed or given.

Every measured number refers to a file of `benchmarks/results` and a path in it; a test compares
them. A rate that no benchmark of this repository has measured is marked as an assumption.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from midstream.errors import SpecError
from midstream.tools.capacity.shape import ModelSize

MEASURED, DERIVED, ASSUMED, GIVEN = "measured", "derived", "assumed", "given"

CAPTURE_8B = "2026-11-22-h200-capture-8b.json"
CAPTURE_SMALL = "2026-11-22-h200-capture-0.6b.json"
TRANSPORT = "2026-11-22-h200-transport.json"
STEP_COST = "2026-11-22-h200-step-cost.json"
WRITER = "2026-11-22-h200-writer-memory.json"


@dataclass(frozen=True, slots=True)
class Measured:
    """A number from a benchmark result.

    Attributes:
        value: value in the result.
        file: file name in `benchmarks/results`.
        path: JSON keys of the value.
    """

    value: float
    file: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A rate used in an estimate.

    Attributes:
        value: value, in the unit of the attribute that holds it.
        basis: measured, derived (from measurements), assumed, or given (by the caller).
        source: where the value is from.
    """

    value: float
    basis: str
    source: str


@dataclass(frozen=True, slots=True)
class Workload:
    """Measurements of one shape of benchmarks/capture_cost.py.

    Prompts are captured at every token and layer, and one token is generated for each. Times are
    seconds of the whole call.

    Attributes:
        prompts, length, layers, vector_bytes: number of prompts, tokens of a prompt, layers, and
            bytes of a vector.
        plain: time of plain vLLM.
        idle: time of the tapped engine without captures.
        last: time with captures of the last prompt token only.
        last_read: time to read the rows of `last` as tensors.
        codecs: time with every row captured, by codec.
    """

    prompts: int
    length: int
    layers: int
    vector_bytes: int
    plain: Measured
    idle: Measured
    last: Measured
    last_read: Measured
    codecs: dict[str, Measured]

    @property
    def rows(self) -> int:
        """Number of captured vectors."""
        return self.prompts * self.length * self.layers

    def per_row(self, codec: str) -> float:
        """Return the seconds that one row adds to a call of plain vLLM."""
        return max(0.0, self.codecs[codec].value - self.plain.value) / self.rows

    @property
    def per_request(self) -> float:
        """Seconds that one request's results take beside the rows, for the call and the reader."""
        added = self.last.value + self.last_read.value - self.idle.value
        return max(0.0, added) / self.prompts


# Variant of the benchmark by codec.
_CODECS = {
    "raw": "every token, raw",
    "full8": "every token, full8",
    "rp8": "every token, rp8:k=512,seed=0",
    "topk8": "every token, topk8:k=64",
}


def _workload(
    file: str, shape: str, size: tuple[int, int, int, int], took: list[float]
) -> Workload:
    """Create a workload.

    Args:
        file: file name in `benchmarks/results`.
        shape: shape's key in it.
        size: prompts, length, layers, vector_bytes.
        took: seconds for each codec in the order of `_CODECS`, then for plain, idle, last and
            last_read; see `Workload`.
    """
    prompts, length, _, _ = size
    work = ("shapes", shape, "work", f"prefill of {prompts} × {length} tokens")

    def one(value: float, variant: str, key: str = "median_s") -> Measured:
        return Measured(value, file, (*work, variant, key))

    *rows, plain, idle, last, read = took
    return Workload(
        *size,
        plain=one(plain, "plain"),
        idle=one(idle, "idle"),
        last=one(last, "last prompt token"),
        last_read=one(read, "last prompt token", "read_s"),
        codecs={
            codec: one(value, variant)
            for (codec, variant), value in zip(_CODECS.items(), rows, strict=True)
        },
    )


# benchmarks/results/2026-11-22-h200-capture-8b.json: a Llama of 8B on one H200.
WIDE = _workload(
    CAPTURE_8B,
    "8b",
    (64, 512, 32, 2 * 4096),
    [
        0.8301217110000607,
        0.8574694699999554,
        0.8975450550000232,
        0.8637403860000177,
        0.7438853700000436,
        0.7671984309999971,
        0.7910192560000269,
        0.026195106000045598,
    ],
)
# benchmarks/results/2026-11-22-h200-capture-0.6b.json: a Qwen3 of 0.6B on one H200.
NARROW = _workload(
    CAPTURE_SMALL,
    "0.6b",
    (256, 512, 28, 2 * 1024),
    [
        0.5786823430000254,
        0.44517585899995993,
        0.4938586640000153,
        0.533478558000013,
        0.30833708300002627,
        0.3270967400000018,
        0.5316706090000025,
        0.04933627000002616,
    ],
)
# benchmarks/results/2026-11-22-h200-transport.json: GB/s from the staging ring to another process.
BUS = Measured(55.377992009302275, TRANSPORT, ("bus_gb_s",))
READER = Measured(19.01259422777633, TRANSPORT, ("raw", "pages_gb_s"))
ENCODERS = {
    "full8": Measured(53.62966455519387, TRANSPORT, ("full8", "vectors_gb_s")),
    "rp8": Measured(70.93199712354101, TRANSPORT, ("rp8:k=512,seed=0", "vectors_gb_s")),
    "topk8": Measured(70.35586546196963, TRANSPORT, ("topk8:k=64", "vectors_gb_s")),
}
# benchmarks/results/2026-11-22-h200-step-cost.json: host time of a step, 256 × 32 rows.
STEP_BEFORE = Measured(76.82300000055875, STEP_COST, ("captures, vectors of 1", "before_us"))
STEP_AFTER = Measured(178.23500000702097, STEP_COST, ("captures, vectors of 1", "after_us"))
# benchmarks/results/2026-11-22-h200-writer-memory.json: writing rows into a store in memory, on the
# GPUs' host. To its disk: 2.3 GB/s, -writer-disk.json.
STORE_WRITER = Measured(2.8813116724719476, WRITER, ("ways", "store", "gb_s"))

MEASUREMENTS = (
    *(
        each
        for work in (WIDE, NARROW)
        for each in (work.plain, work.idle, work.last, work.last_read, *work.codecs.values())
    ),
    BUS,
    READER,
    *ENCODERS.values(),
    STEP_BEFORE,
    STEP_AFTER,
    STORE_WRITER,
)
# The k of `rp8` in the measurements.
MEASURED_K = 512


def flops_of(size: ModelSize, length: int) -> float | None:
    """Return the floating-point operations per prompt token; None if the weights are unknown.

    Args:
        size: size of the model.
        length: tokens of a request; a token attends to half as many on average.
    """
    if size.weights is None:
        return None
    attention = 4 * size.weights.heads_width * (length / 2) * size.num_layers
    return 2 * size.weights.met + attention


def flops_per_gpu() -> Figure:
    """Return the FLOP/s achieved by the prefill of the 8B shape on one H200."""
    from midstream.tools.capacity.shape import read_model

    flops = flops_of(read_model("llama-8b"), WIDE.length)
    assert flops is not None
    value = flops * WIDE.prompts * WIDE.length / WIDE.plain.value
    return Figure(value, DERIVED, f"8B prompts on one H200, plain vLLM, {CAPTURE_8B}")


def row_seconds(codec: str, vector_bytes: int, k: int = MEASURED_K) -> Figure:
    """Return the seconds that one captured row adds to an engine's call.

    Includes tap, copy, codec and the end of the last step. The measured calls have few steps, so
    this overestimates the cost in a long job.

    Measured for vectors of 2 and 8 KiB: interpolated between these, proportional to the width above
    and constant below. For `rp8` with a larger k than measured, also proportional to k.
    """
    narrow, wide = NARROW.per_row(codec), WIDE.per_row(codec)
    low, high = NARROW.vector_bytes, WIDE.vector_bytes
    if vector_bytes >= high:
        cost = wide * vector_bytes / high
    else:
        cost = narrow + (wide - narrow) * max(0, vector_bytes - low) / (high - low)
    source = f"over plain vLLM, {CAPTURE_8B} and {CAPTURE_SMALL}"
    return Figure(cost * _more(codec, k), DERIVED, source)


def encoder_rate(codec: str, k: int = MEASURED_K) -> Figure | None:
    """Return the bytes of vectors that a device encodes per second; None for `raw`."""
    found = ENCODERS.get(codec)
    if found is None:
        return None
    basis = MEASURED if _more(codec, k) == 1 else DERIVED
    return Figure(found.value * 1e9 / _more(codec, k), basis, f"vectors, {TRANSPORT}")


def _more(codec: str, k: int) -> float:
    return max(1.0, k / MEASURED_K) if codec == "rp8" else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """All rates of an estimate, in bytes and seconds.

    Attributes:
        bus: bytes/s from one GPU to the host.
        reader: bytes/s of received rows that one process reads.
        request: seconds of the front end per request's results, at 32 taps.
        step: seconds of the host per forward pass, at 256 sequences and 32 layers.
        writer: bytes/s of one engine's store writer.
        network: bytes/s out of one machine.
        store: bytes/s into the store, from all machines together.
        gpu_flops: FLOP/s of one GPU.
        efficiency: fraction of `gpu_flops` that each GPU achieves in an engine of several.
        gpu_memory: bytes of memory of one GPU.
        engine: tokens/s of one engine, if given; None: estimated from FLOP/s.
    """

    bus: Figure
    reader: Figure
    request: Figure
    step: Figure
    writer: Figure
    network: Figure
    store: Figure
    gpu_flops: Figure
    efficiency: Figure
    gpu_memory: Figure
    engine: Figure | None = None

    def with_given(self, **values: float | None) -> Rates:
        """Return these rates, with those replaced whose value is not None.

        Raises:
            SpecError: a value is not a positive finite number, or an efficiency above 1; the path
                is its name.
        """
        found: dict[str, Figure] = {}
        for name, value in values.items():
            if value is None:
                continue
            if not 0 < value < float("inf"):
                raise SpecError(name, f"expected a number above 0, got {value}")
            found[name] = Figure(value, GIVEN, "as given")
        if (share := found.get("efficiency")) is not None and share.value > 1:
            raise SpecError(
                "efficiency", f"expected a number above 0 and at most 1, got {share.value}"
            )
        return replace(self, **found)


def known_rates() -> Rates:
    """Return the measured rates, and assumptions for the others."""
    gb = 1e9
    return Rates(
        bus=Figure(BUS.value * gb, MEASURED, f"copies to pinned memory on an H200, {TRANSPORT}"),
        reader=Figure(
            READER.value * gb, MEASURED, f"one process that reads every page, {TRANSPORT}"
        ),
        request=Figure(
            WIDE.per_request,
            DERIVED,
            f"one row per layer of 32 compared with none, 64 requests, {CAPTURE_8B}",
        ),
        step=Figure(
            (STEP_BEFORE.value + STEP_AFTER.value) / 1e6,
            MEASURED,
            f"256 sequences × 32 layers, {STEP_COST}",
        ),
        writer=Figure(
            STORE_WRITER.value * gb,
            MEASURED,
            f"into memory; a disk or network may be slower, {WRITER}",
        ),
        network=Figure(25 * gb, ASSUMED, "200 Gbit/s"),
        store=Figure(100 * gb, ASSUMED, "a parallel file system or an object store"),
        gpu_flops=flops_per_gpu(),
        efficiency=Figure(0.8, ASSUMED, "multi-GPU efficiency of one engine"),
        gpu_memory=Figure(141 * gb, ASSUMED, "an H200"),
    )
