"""Recommendation of a codec and a layout, with reasons."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from midstream.codecs import Codec, parse_codec
from midstream.errors import SpecError
from midstream.spec.capture import GATHERED, SHARDED
from midstream.tools.capacity.job import PlannedJob
from midstream.tools.capacity.load import STAGING_SHARE, WRITER, Load, load_of
from midstream.tools.capacity.rates import Rates

# Codecs that are compared by default, from lossless to most lossy.
USUAL = ("raw", "full8", "rp8:k=512,seed=0", "topk8:k=64")
# A job keeps the model's pace if it takes at most this many times as long as without captures.
PACE = 1.25
# Least speedup at which the layout that is not the default is recommended.
WORTH = 1.05
# Resolution of `Capacity.fraction`.
_STEPS = 1000
# What codecs that do not store whole vectors preserve.
_PRESERVED = {
    "rp8": "only vector norms and the angles between vectors",
    "topk8": "only the largest values of each vector",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """Recommendation for a planned job.

    Attributes:
        load: the recommended codec and layout, with their load.
        reasons: reasons, one sentence each.
        notes: further settings to check, one sentence each.
        capacities: for each codec that does not keep the pace, in its better layout, how much
            smaller the job must be.
    """

    load: Load
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    capacities: tuple[Capacity, ...]


def loads_of(
    job: PlannedJob, codecs: Sequence[str], layouts: Sequence[str], rates: Rates
) -> list[Load]:
    """Return the job's load for each codec and layout, in this order.

    Args:
        job: the planned job.
        codecs: codec specs; empty: those of `USUAL` that support the model's vectors.
        layouts: gathered, sharded, or both.
        rates: rates to estimate with.

    Raises:
        SpecError: a given codec is unknown or does not support the model's vectors.
    """
    found = []
    for text in codecs or USUAL:
        codec: Codec = parse_codec(text)
        try:
            found += [load_of(job, codec, layout, rates) for layout in layouts]
        except SpecError as error:
            if codecs or not error.path.startswith("codec"):
                raise
    return found


def advise(job: PlannedJob, loads: Sequence[Load], rates: Rates) -> Advice:
    """Recommend one of several loads.

    The recommendation is the least lossy codec with which the job keeps the model's pace; if none
    does, the fastest. Sharded is recommended only where it is faster.

    Args:
        job: the planned job.
        loads: at least one, less lossy codecs first.
        rates: rates that the loads were estimated with.
    """
    by_codec = [_layout(loads, codec) for codec in dict.fromkeys(one.codec for one in loads)]
    in_pace = [one for one in by_codec if one.first.share <= PACE]
    chosen = in_pace[0] if in_pace else min(by_codec, key=lambda one: one.first.share)
    reasons = [_against(one) for one in by_codec[: by_codec.index(chosen)] if one is not chosen]
    if in_pace:
        reasons.append(
            f"{chosen.codec}: the least lossy codec that keeps the model's pace; the job takes "
            f"{chosen.first.share:.2f} times as long as without captures. "
            f"Bottleneck: {chosen.first.name}."
        )
    else:
        reasons.append(
            f"{chosen.codec}: the fastest; no codec keeps the model's pace. The job takes "
            f"{chosen.first.share:.1f} times as long as without captures. "
            f"Bottleneck: {chosen.first.name}."
        )
    if (preserved := _PRESERVED.get(chosen.codec.partition(":")[0])) is not None:
        reasons.append(
            f"It preserves {preserved}. To store whole vectors, capture fewer taps or tokens."
        )
    over = [one for one in by_codec if one.first.share > PACE]
    return Advice(
        chosen,
        (*reasons, *_about_layout(job, loads, chosen)),
        tuple(_notes(job, chosen, rates)),
        tuple(capacity_of(job, one, rates) for one in over),
    )


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest captures that keep the model's pace with one codec and layout.

    Attributes:
        codec, returned: codec spec; gathered or sharded.
        taps: number of taps, spread evenly over the job's, if the job's fraction of tokens is kept.
        fraction: fraction of all tokens that may be kept, if every tap of the job is captured.
    """

    codec: str
    returned: str
    taps: int
    fraction: float


def capacity_of(job: PlannedJob, load: Load, rates: Rates) -> Capacity:
    """Return how many taps or tokens keep the pace, with the codec and layout of `load`."""
    codec = parse_codec(load.codec)

    def keeps_pace(smaller: PlannedJob) -> bool:
        return load_of(smaller, codec, load.returned, rates).first.share <= PACE

    count = len(job.taps)
    # The load grows monotonically with both, so a binary search finds the limit.
    taps = bisect_left(range(1, count + 1), True, key=lambda n: not keeps_pace(_thinned(job, n)))
    steps = bisect_left(
        range(1, _STEPS + 1),
        True,
        key=lambda n: not keeps_pace(replace(job, fraction=job.fraction * n / _STEPS)),
    )
    return Capacity(load.codec, load.returned, taps, job.fraction * steps / _STEPS)


def _thinned(job: PlannedJob, count: int) -> PlannedJob:
    """Return the job with `count` of its taps, evenly spread."""
    chosen = tuple(job.taps[n * len(job.taps) // count] for n in range(count))
    return replace(job, taps=chosen)


def _layout(loads: Sequence[Load], codec: str) -> Load:
    """Return the better layout of a codec: gathered, unless sharded is faster by `WORTH`."""
    mine = {one.returned: one for one in loads if one.codec == codec}
    if GATHERED not in mine or SHARDED not in mine:
        return next(iter(mine.values()))
    gathered, sharded = mine[GATHERED], mine[SHARDED]
    return sharded if sharded.rate > gathered.rate * WORTH else gathered


def _against(load: Load) -> str:
    return (
        f"{load.codec}: the job would take {load.first.share:.1f} times as long as without "
        f"captures. Bottleneck: {load.first.name}."
    )


def _about_layout(job: PlannedJob, loads: Sequence[Load], chosen: Load) -> list[str]:
    if job.fleet.tp == 1:
        return ["With tp 1, one rank transfers all rows: gathered and sharded are the same."]
    other = next(
        (o for o in loads if o.codec == chosen.codec and o.returned != chosen.returned), None
    )
    if other is None:
        return []
    sharded = chosen if chosen.returned == SHARDED else other
    gathered = other if sharded is chosen else chosen
    parts = f"{_most(sharded) / max(_most(gathered), 1e-9):.0%} of a stage's bytes"
    if sharded is chosen:
        return [
            f"sharded: each rank transfers at most {parts}; with gathered, the first rank "
            f"transfers all. The job is {sharded.rate / gathered.rate:.2f} times as fast."
        ]
    gain = sharded.rate / gathered.rate - 1
    if gain < 0.005:
        return [
            f"gathered: the bottleneck is {gathered.first.name}, which sharded does not relieve."
        ]
    return [f"gathered: sharded would make the job only {gain:.0%} faster."]


def _most(load: Load) -> float:
    return max(max(stage) for stage in load.rank_bytes)


def _notes(job: PlannedJob, chosen: Load, rates: Rates) -> list[str]:
    notes = []
    memory = rates.gpu_memory.value
    ring = memory / STAGING_SHARE
    if chosen.ring_bytes > ring:
        fitting = int(job.step_tokens * ring / chosen.ring_bytes)
        notes.append(
            f"Staging ring too small: rows of a full step of {job.step_tokens:,} tokens take "
            f"{chosen.ring_bytes / 1e9:.1f} GB of a rank, and the default ring has "
            f"{ring / 1e9:.1f} GB. Such requests are rejected. Set staging_bytes to twice the "
            f"size of a step's rows, or max_num_batched_tokens to at most {fitting:,}."
        )
    weights = job.size.weights
    if weights is not None:
        mine = weights.total * job.size.itemsize / job.fleet.gpus
        if mine > 0.9 * memory:
            notes.append(
                f"The weights take {mine / 1e9:.0f} GB of each GPU's {memory / 1e9:.0f} GB and do "
                "not fit unless they are quantised. Increase tp or pp."
            )
        if weights.has_experts:
            notes.append(
                "The speed is estimated as that of a dense model with the weights active per "
                "token; models with experts were not measured. Pass your model's speed with "
                "--tokens-per-second."
            )
    if job.fleet.spans_nodes:
        notes.append(
            "An engine spans machines: rows of stages on other machines than the front end are "
            "transferred in vLLM's own messages, whose speed was not measured."
        )
    slow = chosen.resource(WRITER)
    if chosen.first is slow and slow.basis == "measured":
        notes.append(
            "The store writer's rate was measured with a store in memory. Measure your disk or "
            "network with `python benchmarks/disk.py FOLDER --shape none` and pass the result "
            "with --writer."
        )
    return notes
