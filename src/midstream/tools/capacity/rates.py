"""What things cost: what was measured, on what, and what is made of it.

Every measured number is one of `benchmarks/results`, named by its file and its place in it; a test
holds them to that. What no benchmark of this repository has measured is an assumption, and says so.
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
    """A number of a benchmark's result.

    Attributes:
        value: as it is there.
        file: in `benchmarks/results`.
        path: the keys that lead to it.
    """

    value: float
    file: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """A rate that a plan reckons with.

    Attributes:
        value: in the unit that its name says.
        basis: measured, derived (from what was measured), assumed, or given (by whoever asks).
        source: what it is from.
    """

    value: float
    basis: str
    source: str


@dataclass(frozen=True, slots=True)
class Workload:
    """One shape of benchmarks/capture_cost.py: prompts of which every token was captured at every
    layer, with one token generated each.

    Attributes:
        prompts, length, layers, vector_bytes: its size.
        plain: seconds of plain vLLM.
        idle: of the tapped engine, with nothing captured.
        last: with the last prompt token's rows alone.
        last_read: … until they are tensors.
        codecs: with every row, by codec.
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
        """How many vectors were captured."""
        return self.prompts * self.length * self.layers

    def per_row(self, codec: str) -> float:
        """Seconds that one row adds to the call, over plain vLLM."""
        return max(0.0, self.codecs[codec].value - self.plain.value) / self.rows

    @property
    def per_request(self) -> float:
        """Seconds that one request's results take, rows beside: its call's and its reader's."""
        added = self.last.value + self.last_read.value - self.idle.value
        return max(0.0, added) / self.prompts


# In the order of `_CODECS`, then plain, idle, last prompt token, and what it takes to read that.
_CODECS = {
    "raw": "every token, raw",
    "full8": "every token, full8",
    "rp8": "every token, rp8:k=512,seed=0",
    "topk8": "every token, topk8:k=64",
}


def _workload(
    file: str, shape: str, size: tuple[int, int, int, int], took: list[float]
) -> Workload:
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
# benchmarks/results/2026-11-22-h200-transport.json: GB/s from the device's ring to another process.
BUS = Measured(55.377992009302275, TRANSPORT, ("bus_gb_s",))
READER = Measured(19.01259422777633, TRANSPORT, ("raw", "pages_gb_s"))
ENCODERS = {
    "full8": Measured(53.62966455519387, TRANSPORT, ("full8", "vectors_gb_s")),
    "rp8": Measured(70.93199712354101, TRANSPORT, ("rp8:k=512,seed=0", "vectors_gb_s")),
    "topk8": Measured(70.35586546196963, TRANSPORT, ("topk8:k=64", "vectors_gb_s")),
}
# benchmarks/results/2026-11-22-h200-step-cost.json: the host's part of a step, 256 × 32 rows.
STEP_BEFORE = Measured(76.82300000055875, STEP_COST, ("captures, vectors of 1", "before_us"))
STEP_AFTER = Measured(178.23500000702097, STEP_COST, ("captures, vectors of 1", "after_us"))
# benchmarks/results/2026-11-22-h200-writer-memory.json: rows into a store in memory, by the host of
# the GPUs; to its disk, -writer-disk.json, 2.3 GB/s.
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
MEASURED_K = 512  # of rp8


def flops_of(size: ModelSize, length: int) -> float | None:
    """Floating-point operations of one prompt token; None where the weights are not known.

    Args:
        size: the model.
        length: tokens of a request. Of those before it a token meets half as many, on average.
    """
    if size.weights is None:
        return None
    attention = 4 * size.weights.heads_width * (length / 2) * size.num_layers
    return 2 * size.weights.met + attention


def flops_per_gpu() -> Figure:
    """FLOP/s that the 8B shape's prefill came to on one H200."""
    from midstream.tools.capacity.shape import read_model

    flops = flops_of(read_model("llama-8b"), WIDE.length)
    assert flops is not None
    value = flops * WIDE.prompts * WIDE.length / WIDE.plain.value
    return Figure(value, DERIVED, f"8B prompts on one H200, plain vLLM, {CAPTURE_8B}")


def row_seconds(codec: str, vector_bytes: int, k: int = MEASURED_K) -> Figure:
    """Seconds by which one captured row lengthens an engine's call: tap, copy, codec, the tail of
    the last step. The calls that it was measured in are few steps long, so that a longer job pays
    less.

    Measured at vectors of 2 and of 8 KiB. Between those it is interpolated, beyond them taken to
    grow with the width, below them to stay; and with k, for an `rp8` of more than was measured.
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
    """Bytes of vectors that a device encodes in a second; None: `raw` does nothing to them."""
    found = ENCODERS.get(codec)
    if found is None:
        return None
    basis = MEASURED if _more(codec, k) == 1 else DERIVED
    return Figure(found.value * 1e9 / _more(codec, k), basis, f"vectors, {TRANSPORT}")


def _more(codec: str, k: int) -> float:
    return max(1.0, k / MEASURED_K) if codec == "rp8" else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """All that a plan reckons with. Bytes and seconds.

    Attributes:
        bus: bytes/s from one GPU to the host.
        reader: bytes/s that one process reads of what arrived.
        request: seconds of the front end for the results of one request, at 32 taps.
        step: seconds of the host around a forward, at 256 sequences and 32 layers.
        writer: bytes/s of one engine's store writer.
        network: bytes/s out of one machine.
        store: bytes/s into the store, from all machines together.
        gpu_flops: FLOP/s of one GPU.
        efficiency: what of that is left where several GPUs make one engine.
        gpu_memory: bytes of one GPU.
        engine: tokens/s of one engine, where it is known; None: by FLOP/s.
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
        """These rates, with those in their place that are not None.

        Raises:
            SpecError: one is not a positive number; the path is its name.
        """
        found: dict[str, Figure] = {}
        for name, value in values.items():
            if value is None:
                continue
            if not 0 < value < float("inf"):
                raise SpecError(name, f"expected a number above 0, got {value}")
            found[name] = Figure(value, GIVEN, "as given")
        if (share := found.get("efficiency")) is not None and share.value > 1:
            raise SpecError("efficiency", f"expected a share of 1, above 0, got {share.value}")
        return replace(self, **found)


def known_rates() -> Rates:
    """What was measured, and assumptions for the rest."""
    gb = 1e9
    return Rates(
        bus=Figure(BUS.value * gb, MEASURED, f"copies to pinned memory on an H200, {TRANSPORT}"),
        reader=Figure(
            READER.value * gb, MEASURED, f"one process that looks at every page, {TRANSPORT}"
        ),
        request=Figure(
            WIDE.per_request,
            DERIVED,
            f"one row of each of 32 layers against none, 64 requests, {CAPTURE_8B}",
        ),
        step=Figure(
            (STEP_BEFORE.value + STEP_AFTER.value) / 1e6,
            MEASURED,
            f"256 sequences × 32 layers, {STEP_COST}",
        ),
        writer=Figure(
            STORE_WRITER.value * gb,
            MEASURED,
            f"into memory; a disk or a network may take less, {WRITER}",
        ),
        network=Figure(25 * gb, ASSUMED, "200 Gbit/s"),
        store=Figure(100 * gb, ASSUMED, "a parallel file system or an object store"),
        gpu_flops=flops_per_gpu(),
        efficiency=Figure(0.8, ASSUMED, "what several GPUs keep of their speed as one engine"),
        gpu_memory=Figure(141 * gb, ASSUMED, "an H200"),
    )
