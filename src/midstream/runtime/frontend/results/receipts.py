"""Receipts: what was asked of one completion against what the workers did for it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np

from midstream.config.config import Config
from midstream.errors import ReceiptError, ReceiptWarning
from midstream.results.activations import Activations
from midstream.results.probe_scores import Probes
from midstream.results.receipt import Captured, Edited, Probed, Receipt, Selected
from midstream.runtime.protocol.results import WorkerResult
from midstream.runtime.protocol.runs import Ints
from midstream.runtime.protocol.segments import APPLIED_0, CACHED, UNSEEN
from midstream.runtime.protocol.worker_info import place_of
from midstream.sites import Tap
from midstream.spec import ResolvedPlan
from midstream.spec.positions.ranges import clip, merge

Final = tuple[tuple[int, int], ...]


def make_receipt(
    request_id: str,
    plan: ResolvedPlan,
    parts: list[WorkerResult],
    completion: Any,
    tokens: Sequence[int],
    activations: Activations | None,
    probes: Probes | None,
) -> Receipt:
    """The receipt of one completion.

    Args:
        request_id: vLLM's.
        plan: what was asked for.
        parts: what the workers sent.
        completion: vLLM's CompletionOutput.
        tokens: the id of each row's token, prompt first.
        activations, probes: what of the workers' answer belongs to the plan.
    """
    length = len(tokens)
    problems = []
    if completion.finish_reason == "error":
        problems.append(str(completion.stop_reason or "the engine ended it with an error"))
    problems += [f"{part.problem} (worker {part.worker.place})" for part in parts if part.problem]
    if not parts:
        problems.append("the workers know nothing of it")
    problems += _missing(parts)
    dropped = sum(part.dropped for part in parts)
    came = {} if activations is None else activations.counts()
    rows = plan.expected_rows(length, tokens)
    there = tuple(came.get(tap, 0) for tap in plan.taps)
    captured = _captured(plan.taps, tuple(rows.values()), there)
    lost = 0
    if came != rows:
        lost = sum(max(0, one.expected - one.actual) for one in captured)
        # A row that found no room may have been computed, and kept, another time.
        if lost > dropped or any(one.actual > one.expected for one in captured):
            problems += [
                f"{one.site} of layer {one.layer}: {one.actual} rows came, expected {one.expected}"
                for one in captured
                if one.actual != one.expected
            ]
    probed = []
    for probe in plan.probes:
        if probe.name:
            expected = _count(probe.where.final(length, tokens))
            actual = 0 if probes is None else len(probes[probe.name])
            probed.append(Probed(probe.name, probe.site, probe.layer, expected, actual))
            if actual != expected:
                problems.append(f"probe {probe.name}: {actual} scores came, expected {expected}")
    edited = None
    if plan.edits or plan.probes:
        counts, wrong = _edited(plan, parts, length, tokens)
        edited = counts if plan.edits else None
        problems += wrong
    return Receipt(
        request_id=request_id,
        prompt_tokens=plan.prompt_len,
        generated_tokens=len(completion.token_ids),
        captured=captured,
        edited=edited,
        probed=tuple(probed),
        selected=_selected(plan, length, tokens),
        dropped=min(lost, dropped),
        problems=tuple(problems),
    )


# Of many requests these are the same.
@functools.lru_cache(maxsize=256)
def _captured(
    taps: tuple[Tap, ...], expected: tuple[int, ...], actual: tuple[int, ...]
) -> tuple[Captured, ...]:
    return tuple(
        Captured(*tap, wanted, there)
        for tap, wanted, there in zip(taps, expected, actual, strict=True)
    )


def _edited(
    plan: ResolvedPlan, parts: list[WorkerResult], length: int, tokens: Sequence[int]
) -> tuple[Edited, list[str]]:
    """Counts edits position by position, over the pipeline's stages."""
    finals = {edit.where: edit.where.final(length, tokens) for edit in plan.edits}
    edits = _add_up((finals[edit.where] for edit in plan.edits), length)
    # The device counts a probe like an edit, and carries it out wherever it may be wanted.
    reads = _add_up((clip(probe.where.possible, length) for probe in plan.probes), length)
    expected = edits + reads
    done = np.zeros(length, np.int64)
    # What the cache served was computed for another request that asked for the same there: the
    # blocks' keys say so.
    cached = np.full(length, bool(parts))
    problems = []
    first_ranks: dict[int, tuple[WorkerResult, Ints]] = {}
    for part in sorted(parts, key=lambda part: part.worker.tensor_rank):
        stage = part.worker.stage
        states = np.full(length, UNSEEN, np.int64)
        known = part.states[:length]
        states[: known.size] = known
        edited = np.maximum(states - APPLIED_0, 0)
        if stage not in first_ranks:
            first_ranks[stage] = part, edited
            done += edited
            cached &= states == CACHED
            continue
        leader, theirs = first_ranks[stage]
        apart = np.flatnonzero(edited != theirs)
        if apart.size:
            # Each rank edits its own copy of the stream: one that did not has made it another.
            problems.append(
                f"{apart.size} positions were not edited alike on workers "
                f"{leader.worker.place} and {part.worker.place}; the first is {apart[0]}"
            )
    wrong = np.flatnonzero((done != expected) & ~cached)
    if wrong.size:
        first = int(wrong[0])
        problems.append(
            f"{wrong.size} positions were not edited as asked: position {first} got "
            f"{done[first]} edits and probes, expected {expected[first]}"
        )
    applied = np.maximum(done - reads, 0)
    counts = Edited(
        expected=int(edits.sum()),
        applied=int(applied.sum()),
        tokens=int((edits > 0).sum()),
        cached=int(edits[cached].sum()),
    )
    return counts, problems


def _missing(parts: list[WorkerResult]) -> list[str]:
    """Ranks that know nothing of what another one of their stage has done: they did no edit."""
    ranks: dict[int, set[int]] = {}
    for part in parts:
        ranks.setdefault(part.worker.stage, set()).add(part.worker.tensor_rank)
    every = set(range(parts[0].worker.tensor_ranks)) if parts else set()
    return [
        f"worker {place_of(parts[0].worker.replica, stage, rank)} knows nothing of it"
        for stage, there in ranks.items()
        for rank in sorted(every - there)
    ]


def _add_up(finals: Iterable[Final], length: int) -> Ints:
    """How many of some selections each position is in."""
    steps = np.zeros(length + 1, np.int64)
    for ranges in finals:
        for start, stop in ranges:
            steps[start] += 1
            steps[stop] -= 1
    return np.cumsum(steps[:length])


def _selected(plan: ResolvedPlan, length: int, tokens: Sequence[int]) -> tuple[Selected, ...]:
    """What every selection of the plan came to."""
    found = [
        # Captures of every request count from their end, as server-wide edits do.
        Selected(
            f"capture[{one.source}]" if one.source >= 0 else f"sinks[{one.source}]",
            one.where.final(length, tokens),
        )
        for one in plan.captures
    ]
    by_source: dict[int, list[tuple[int, int]]] = {}
    for edit in {(edit.source, edit.where): edit for edit in plan.edits}.values():
        by_source.setdefault(edit.source, []).extend(edit.where.final(length, tokens))
    found += [
        # Server-wide edits come before the request's own, and count from their end.
        Selected(
            f"edits[{source}]" if source >= 0 else f"steering[{source}]",
            clip(merge(ranges), length),
        )
        for source, ranges in by_source.items()
    ]
    named = [probe for probe in plan.probes if probe.name]
    found += [
        Selected(f"probes[{nth}]", probe.where.final(length, tokens))
        for nth, probe in enumerate(named)
    ]
    return tuple(found)


def _count(ranges: Final) -> int:
    return sum(stop - start for start, stop in ranges)


class ReceiptReporter:
    """The receipts with problems, until their caller is told."""

    def __init__(self, config: Config) -> None:
        self._warns = config.on_mismatch == "warn"
        self._receipts: list[Receipt] = []

    def add(self, output: Any) -> None:
        """Takes note of an output whose completions have their receipts."""
        self._receipts += [one.receipt for one in output.outputs if one.receipt.problems]

    def forget(self, request_ids: Container[str]) -> None:
        """Nobody waits for these requests any more."""
        self._receipts = [one for one in self._receipts if one.request_id not in request_ids]

    def report(self, outputs: Sequence[Any] = ()) -> None:
        """Tells the caller, once.

        Args:
            outputs: what the call has to give.

        Raises:
            ReceiptError: there were problems, and the settings do not say that they are only to be
                warned of.
        """
        receipts, self._receipts = self._receipts, []
        if not receipts:
            return
        complaints = [receipt.complaint for receipt in receipts]
        if not self._warns:
            raise ReceiptError("\n".join(complaints), outputs)
        for complaint in complaints:
            warnings.warn(complaint, ReceiptWarning, stacklevel=2)
