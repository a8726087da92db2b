"""Which codec and layout to choose, and why."""

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

# From what loses nothing to what loses most.
USUAL = ("raw", "full8", "rp8:k=512,seed=0", "topk8:k=64")
# A job that is no more than so much slower than the model alone keeps its pace.
PACE = 1.25
# What is so much faster, and no less, is worth a layout that is not the default.
WORTH = 1.05
_STEPS = 1000
# Of codecs that do not keep whole vectors.
_KEPT = {"rp8": "lengths of vectors and angles between them, alone", "topk8": "the largest values"}


@dataclass(frozen=True, slots=True)
class Advice:
    """What to choose.

    Attributes:
        load: the choice.
        reasons: why, a sentence each.
        notes: what else must be seen to, a sentence each.
        room: what each codec leaves room for, in its better layout; none where all of the job
            keeps the pace.
    """

    load: Load
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    room: tuple[Room, ...]


def loads_of(
    job: PlannedJob, codecs: Sequence[str], layouts: Sequence[str], rates: Rates
) -> list[Load]:
    """The job with each codec and layout, in this order; without codecs with the usual ones that
    can write vectors of its model.

    Raises:
        SpecError: a codec that was named is none, or cannot write such vectors.
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
    """The choice among some loads: of the codecs with which the job keeps the model's pace the one
    that loses least, and where none does, the fastest; sharded only where it is faster.

    Args:
        job: what is planned.
        loads: at least one, those with less lossy codecs first.
        rates: what they were reckoned from.
    """
    by_codec = [_layout(loads, codec) for codec in dict.fromkeys(one.codec for one in loads)]
    in_pace = [one for one in by_codec if one.first.share <= PACE]
    chosen = in_pace[0] if in_pace else min(by_codec, key=lambda one: one.first.share)
    reasons = [_against(one) for one in by_codec[: by_codec.index(chosen)] if one is not chosen]
    if in_pace:
        reasons.append(
            f"{chosen.codec}: {chosen.first.share:.2f} times as long, the least lossy that keeps "
            f"the model's pace; it waits for: {chosen.first.name}."
        )
    else:
        reasons.append(
            f"{chosen.codec}: the nearest to the model's pace, which none keeps; "
            f"{chosen.first.share:.1f} times as long, waiting for: {chosen.first.name}."
        )
    if (kept := _KEPT.get(chosen.codec.partition(":")[0])) is not None:
        reasons.append(f"It keeps {kept}. For whole vectors take fewer taps or fewer tokens.")
    over = [one for one in by_codec if one.first.share > PACE]
    return Advice(
        chosen,
        (*reasons, *_about_layout(job, loads, chosen)),
        tuple(_notes(job, chosen, rates)),
        tuple(room_of(job, one, rates) for one in over),
    )


@dataclass(frozen=True, slots=True)
class Room:
    """What a codec and layout leave room for at the model's pace.

    Attributes:
        codec, returned: which.
        taps: how many of the job's, spread over its layers, of every token that it keeps.
        fraction: of all tokens, the share whose rows at every tap may be kept.
    """

    codec: str
    returned: str
    taps: int
    fraction: float


def room_of(job: PlannedJob, load: Load, rates: Rates) -> Room:
    """How much less would keep the pace, with the codec and layout of a load."""
    codec = parse_codec(load.codec)

    def holds(smaller: PlannedJob) -> bool:
        return load_of(smaller, codec, load.returned, rates).first.share <= PACE

    count = len(job.taps)
    # What is needed grows with both.
    taps = bisect_left(range(1, count + 1), True, key=lambda n: not holds(_spread(job, n)))
    steps = bisect_left(
        range(1, _STEPS + 1),
        True,
        key=lambda n: not holds(replace(job, fraction=job.fraction * n / _STEPS)),
    )
    return Room(load.codec, load.returned, taps, job.fraction * steps / _STEPS)


def _spread(job: PlannedJob, count: int) -> PlannedJob:
    """The job with so many of its taps, evenly spread."""
    chosen = tuple(job.taps[n * len(job.taps) // count] for n in range(count))
    return replace(job, taps=chosen)


def _layout(loads: Sequence[Load], codec: str) -> Load:
    """The better layout of a codec: gathered, unless sharded is worth it."""
    mine = {one.returned: one for one in loads if one.codec == codec}
    if GATHERED not in mine or SHARDED not in mine:
        return next(iter(mine.values()))
    gathered, sharded = mine[GATHERED], mine[SHARDED]
    return sharded if sharded.rate > gathered.rate * WORTH else gathered


def _against(load: Load) -> str:
    return (
        f"{load.codec}: the job would take {load.first.share:.1f} times as long as the model "
        f"alone; it waits for: {load.first.name}."
    )


def _about_layout(job: PlannedJob, loads: Sequence[Load], chosen: Load) -> list[str]:
    if job.fleet.tp == 1:
        return ["With tp 1 there is one rank to move rows: gathered and sharded are the same."]
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
            f"sharded: each rank moves at most {parts}, where gathered has the first of them move "
            f"all; the job is {sharded.rate / gathered.rate:.2f} times as fast."
        ]
    gain = sharded.rate / gathered.rate - 1
    if gain < 0.005:
        return [
            f"gathered: {gathered.first.name} saturates first, and sharded does not change that."
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
            f"The ring: rows of a full step of {job.step_tokens:,} tokens take "
            f"{chosen.ring_bytes / 1e9:.1f} GB of a rank, and by default it has "
            f"{ring / 1e9:.1f} GB. Such requests are refused; set staging_bytes to twice what "
            f"a step takes, or max_num_batched_tokens to {fitting:,} or less."
        )
    weights = job.size.weights
    if weights is not None:
        mine = weights.total * job.size.itemsize / job.fleet.gpus
        if mine > 0.9 * memory:
            notes.append(
                f"The weights take {mine / 1e9:.0f} GB of each GPU's {memory / 1e9:.0f} GB: they "
                "do not fit, unless they are quantised; raise tp or pp."
            )
        if weights.has_experts:
            notes.append(
                "The speed is that of a dense model with as many weights as a token meets; models "
                "with experts were not measured. Say what yours does with --tokens-per-second."
            )
    if job.fleet.spans_nodes:
        notes.append(
            "An engine spans machines: rows of a stage that is not beside the front end come "
            "through vLLM's own messages, whose speed was not measured."
        )
    slow = chosen.resource(WRITER)
    if chosen.first is slow and slow.basis == "measured":
        notes.append(
            "The store writer's rate is into memory. Measure that of your disk or network, with "
            "`python benchmarks/disk.py FOLDER --shape none`, and give it with --writer."
        )
    return notes
