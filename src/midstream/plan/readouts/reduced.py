"""Resolution of a `Capture` whose rows are reduced on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from midstream.errors import SpecError
from midstream.plan.positions.position_set import Where
from midstream.plan.resolved import (
    LENGTHS,
    ON_DEVICE,
    REDUCING,
    Pattern,
    ResolvedCapture,
    ResolvedPlan,
)
from midstream.plan.shape import ModelShape
from midstream.sites import Tap

# Vectors of sums that a kind needs, and numbers that it returns, of each component.
SUMS = {"mean": 1, "max": 1, "moments": 3}
RETURNED = {"mean": 1, "max": 1, "moments": 2}


def resolve_reduced(
    kind: str,
    source: int,
    taps: tuple[Tap, ...],
    where: Where,
    prompt_len: int,
    shape: ModelShape,
) -> list[ResolvedCapture]:
    """Resolve a capture whose rows are reduced: one for each width of vectors."""
    if kind in (*REDUCING, ON_DEVICE):
        _check_prompt(kind, where, prompt_len)
    for site, layer in taps if kind == ON_DEVICE else ():
        if shape.width((site, layer)) != shape.hidden_size:
            raise SpecError(
                "sites",
                f'reduce="{kind}" is of vectors as wide as the residual stream, and those of '
                f"{site} have {shape.width((site, layer))} numbers",
            )
    by_width: dict[int, list[Tap]] = {}
    for tap in taps:
        by_width.setdefault(1 if kind in LENGTHS else shape.width(tap), []).append(tap)
    captures = []
    for width, reads in by_width.items():
        size = 1 + RETURNED[kind] * width if kind in REDUCING else 1
        names = tuple((f"{kind}.{site}", layer) for site, layer in reads)
        pattern = Pattern(kind, size, (), (), tuple(reads), (1,) * len(reads))  # type: ignore[arg-type]
        captures.append(ResolvedCapture(names, where, source, pattern))
    return captures


def _check_prompt(kind: str, where: Where, prompt_len: int) -> None:
    stop = where.ranges[-1][1] if where.ranges else None
    if where.matches or where.last_from is not None or stop is None or stop > prompt_len:
        raise SpecError(
            "positions",
            f'reduce="{kind}" is of tokens of the prompt, {prompt_len} here, and others are '
            "selected: an engine computes rows after the end of a completion too, which would "
            'count. Give positions of the prompt, such as "prompt", or send the completion as a '
            "prompt; rows of generated tokens can be captured as they are, or their norms",
        )


def check_reduced(captures: Sequence[ResolvedCapture]) -> None:
    """Check that what is reduced is captured once."""
    seen: dict[Tap, tuple[int, bool]] = {}
    for capture in captures:
        reduced = is_reduced(capture)
        for tap in capture.taps if capture.pattern is None else capture.pattern.reads:
            other, was_reduced = seen.setdefault(tap, (capture.source, reduced))
            if other != capture.source and (reduced or was_reduced):
                site, layer = tap
                raise SpecError(
                    f"capture[{capture.source}]",
                    f"capture[{other}] selects {site} of layer {layer} too, and a request has one "
                    "result of a site and layer where rows are reduced; send another request",
                )


def with_split_rows(plan: ResolvedPlan, parts: Mapping[Tap, int]) -> ResolvedPlan:
    """Return a plan whose reduced rows have as many parts as the vectors have on the ranks."""
    captures: list[ResolvedCapture] = []
    for capture in plan.captures:
        pattern = capture.pattern
        if pattern is None or not is_reduced(capture):
            captures.append(capture)
            continue
        counts: dict[int, list[int]] = {}
        for place, tap in enumerate(pattern.reads):
            counts.setdefault(parts.get(tap, 1), []).append(place)
        if pattern.kind in LENGTHS and set(counts) - {1}:
            site = next(site for site, layer in pattern.reads if (site, layer) in parts)
            raise SpecError(
                f"capture[{capture.source}].reduce",
                f"{site} is split over the ranks under tensor parallelism, and a norm needs all of "
                'it; use reduce="mean", "max" or "moments", capture the rows, or use '
                "tensor_parallel_size=1",
            )
        for count, places in counts.items():
            own = replace(
                pattern,
                size=1 + (pattern.size - 1) // count if pattern.reduces else 1,
                reads=tuple(pattern.reads[place] for place in places),
                counts=(count,) * len(places),
            )
            taps = tuple(capture.taps[place] for place in places)
            captures.append(replace(capture, taps=taps, pattern=own))
    return replace(plan, captures=tuple(captures))


def check_codec(plan: ResolvedPlan) -> None:
    """Check that what is captured beside reduced rows is not encoded."""
    reduced = [capture for capture in plan.captures if is_reduced(capture)]
    whole = [capture for capture in plan.captures if capture.pattern is None]
    if reduced and whole and plan.codec != "raw":
        raise SpecError(
            f"capture[{reduced[0].source}].reduce",
            f"other rows of the request have the codec {plan.codec}, and reduced ones have none; "
            'give these captures codec="raw", or send another request',
        )


def is_reduced(capture: ResolvedCapture) -> bool:
    return capture.pattern is not None and capture.kind in (*REDUCING, *LENGTHS)


def num_sums(plan: ResolvedPlan, shape: ModelShape) -> int:
    """Return the number of vectors of sums, each as wide as the stream, that a plan needs."""
    total = 0
    for capture in plan.captures:
        if capture.pattern is not None and capture.pattern.reduces:
            numbers = sum(shape.width(tap) for tap in capture.pattern.reads)
            total += SUMS[capture.pattern.kind] * -(-numbers // shape.hidden_size)
    return total
