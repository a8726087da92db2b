"""Receipts: what the workers did for a completion, compared with its plan."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from midstream.config.config import Config
from midstream.errors import ReceiptError, ReceiptWarning
from midstream.plan import ResolvedPlan, ResolvedProbe
from midstream.plan.positions.range_set import intersect
from midstream.plan.positions.ranges import clip, merge
from midstream.plan.resolved import ResolvedCapture, path_of
from midstream.results.activations import Activations
from midstream.results.probe_scores import Probes
from midstream.results.receipt import (
    Called,
    Captured,
    Edited,
    Nonfinite,
    Probed,
    Receipt,
    Selected,
    Version,
    WeightVersion,
)
from midstream.runtime.frontend.request.prepared_plan import LaterPlan
from midstream.runtime.frontend.results.actions import actions_of
from midstream.runtime.frontend.results.doses import warn_of_doses
from midstream.runtime.frontend.results.held_plans import HeldPlan, held_plans
from midstream.runtime.frontend.results.readouts import num_reduced
from midstream.runtime.protocol.results import WorkerResult
from midstream.runtime.protocol.runs import Ints
from midstream.runtime.protocol.segments import APPLIED_0, CACHED, MOST_APPLIED, NONFINITE, UNSEEN
from midstream.runtime.protocol.worker_info import place_of
from midstream.sites import Tap

Final = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class EndedCompletion:
    """A completion that has ended, and what the workers answered of it."""

    completion: Any
    parts: list[WorkerResult]
    tokens: list[int]  # of each row, prompt first
    probes: Probes | None  # None: the plan has no named probes


def make_receipt(
    request_id: str,
    plan: ResolvedPlan,
    ended: EndedCompletion,
    activations: Activations | None,
    coming_from: tuple[tuple[str, str], ...] = (),
    later: Mapping[int, LaterPlan] = MappingProxyType({}),
) -> Receipt:
    """Return the receipt of one completion. `activations`: None: the plan has no captures."""
    completion, parts, tokens, probes = ended.completion, ended.parts, ended.tokens, ended.probes
    length = len(tokens)
    problems: list[str] = []
    if completion.finish_reason == "error":
        problems.append(str(completion.stop_reason or "the engine ended it with an error"))
    problems += [f"{part.problem} (worker {part.worker.place})" for part in parts if part.problem]
    if not parts:
        problems.append("the workers know nothing of it")
    problems += _missing(parts)
    dropped = sum([part.dropped for part in parts])
    came = {} if activations is None else activations.counts()
    if activations is not None and plan.reduced:
        came = {**came, **num_reduced(activations, plan)}
    rows = plan.expected_rows(length, tokens)
    lost = 0
    if came == rows:
        captured = plan.remember("captured", length, lambda: _captured(rows, rows))
    else:
        captured = _captured(rows, came)
        lost = sum(_lost(tap, plan) for tap in captured)
        partly = any(
            0 < tap.actual < tap.expected and (tap.site, tap.layer) in plan.reduced
            for tap in captured
        )
        # A row that was dropped may have been computed again, and stored then.
        if lost > dropped or partly or any(tap.actual > tap.expected for tap in captured):
            problems += [
                f"{tap.site} of layer {tap.layer}: {tap.actual} rows came, expected {tap.expected}"
                for tap in captured
                if tap.actual != tap.expected
            ]
    probed = []
    hit = max((_num_cached(part.states) for part in parts), default=0)
    for probe in plan.probes:
        if probe.name:
            expected = _count(probe.where.final(length, tokens))
            actual = 0 if probes is None else len(probes[probe.name])
            unscored = 0 if probes is None else _unscored(probe.name, probes, hit)
            probed.append(Probed(probe.name, probe.site, probe.layer, expected, actual, unscored))
            if actual != expected:
                problems.append(f"probe {probe.name}: {actual} scores came, expected {expected}")
    held, wrong = held_plans(plan, later, parts, length)
    problems += wrong
    edited = None
    versions: tuple[Version, ...] = ()
    if any(version.plan.edits or version.plan.probes for version in held):
        counts, versions, wrong = _edited(held, parts, length, tokens)
        edited = counts if any(version.plan.edits for version in held) else None
        problems += wrong
    selected = plan.remember("receipt", length, lambda: _selected(plan, length, tokens))
    if len(held) > 1:
        selected = tuple(_selected_by_version(held, selected, length, tokens))
    return Receipt(
        request_id=request_id,
        prompt_tokens=plan.prompt_len,
        generated_tokens=len(completion.token_ids),
        captured=captured,
        edited=edited,
        probed=tuple(probed),
        selected=selected,
        dropped=min(lost, dropped),
        problems=tuple(problems),
        nonfinite=_nonfinite(parts, length),
        coming_from=coming_from,
        called=_called(plan, parts, length, tokens),
        versions=versions,
        actions=actions_of(plan, completion, length, probes, held),
        weight_versions=tuple(
            WeightVersion(*state) for state in sorted({s for part in parts for s in part.weights})
        ),
    )


def _unscored(name: str, probes: Probes, hit: int) -> int:
    """Return how many scores are NaN of the first tokens, those that the cache served."""
    if not hit:
        return 0
    positions = probes.positions_of(name).numpy()
    is_nan = np.isnan(probes[name].numpy()[: np.searchsorted(positions, hit)])
    return int((is_nan if is_nan.ndim == 1 else is_nan.any(1)).sum())


def _num_cached(states: NDArray[np.uint16]) -> int:
    """Return the number of first positions that the cache served."""
    if not states.size or states[0] != CACHED:
        return 0
    computed = np.flatnonzero(states != CACHED)
    return int(computed[0]) if computed.size else int(states.size)


def _nonfinite(parts: list[WorkerResult], length: int) -> Nonfinite | None:
    if not any((part.states >= NONFINITE).any() for part in parts):
        return None
    is_nonfinite = np.zeros(length, np.bool_)
    for part in parts:
        states = part.states[:length]
        is_nonfinite[: states.size] |= states >= NONFINITE
    where = np.flatnonzero(is_nonfinite)
    return Nonfinite(int(where.size), int(where[0])) if where.size else None


def _lost(tap: Captured, plan: ResolvedPlan) -> int:
    """Return the number of rows of a tap that did not come; a reduced one is one row."""
    if not tap.actual and (tap.site, tap.layer) in plan.reduced:
        return min(1, tap.expected)
    return max(0, tap.expected - tap.actual)


def _captured(expected: Mapping[Tap, int], actual: Mapping[Tap, int]) -> tuple[Captured, ...]:
    return tuple([Captured(*tap, count, actual.get(tap, 0)) for tap, count in expected.items()])


def _edited(
    held: Sequence[HeldPlan], parts: list[WorkerResult], length: int, tokens: Sequence[int]
) -> tuple[Edited, tuple[Version, ...], list[str]]:
    """Count edits per position over all stages; return counts, those by version, and problems."""
    edits, reads = _expected_of_versions(held, length, tokens)
    expected = edits + reads
    done = np.zeros(length, np.int64)
    # Rows that the cache served were computed for another request with the same edits: their
    # blocks have the same keys.
    cached = np.full(length, bool(parts))
    problems = []
    first_ranks: dict[int, tuple[WorkerResult, Ints]] = {}
    for part in sorted(parts, key=lambda part: part.worker.tensor_rank):
        stage = part.worker.stage
        states = np.full(length, UNSEEN, np.int64)
        known = part.states[:length]
        states[: known.size] = known & MOST_APPLIED
        edited = np.maximum(states - APPLIED_0, 0)
        if stage not in first_ranks:
            first_ranks[stage] = part, edited
            done += edited
            cached &= states == CACHED
            continue
        leader, theirs = first_ranks[stage]
        apart = np.flatnonzero(edited != theirs)
        if apart.size:
            # Each rank edits its own copy of the residual stream: the copies differ now.
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
    problems += _unread(held, cached)
    applied = np.maximum(done - reads, 0)
    counts = Edited(
        expected=int(edits.sum()),
        applied=int(applied.sum()),
        tokens=int((edits > 0).sum()),
        cached=int(edits[cached].sum()),
    )
    if len(held) == 1:
        return counts, (), problems
    versions = [
        Version(
            number=version.number,
            source="request" if version.later is None else version.later.source,
            positions=(version.start, version.stop),
            scale=1.0 if version.later is None else version.later.scale,
            expected=int(edits[version.start : version.stop].sum()),
            applied=int(applied[version.start : version.stop].sum()),
            cached=int((edits * cached)[version.start : version.stop].sum()),
        )
        for version in held
    ]
    return counts, tuple(versions), problems


def _expected_of_versions(
    held: Sequence[HeldPlan], length: int, tokens: Sequence[int]
) -> tuple[Ints, Ints]:
    """Return the number of edits and of probes at each position, by the version that held there."""
    counts = [
        held_plan.plan.remember("edits", length, partial(_expected, held_plan.plan, length, tokens))
        for held_plan in held
    ]
    if len(counts) == 1:
        return counts[0]
    edits, reads = np.zeros((2, length), np.int64)
    for version, (mine, read) in zip(held, counts, strict=True):
        edits[version.start : version.stop] = mine[version.start : version.stop]
        reads[version.start : version.stop] = read[version.start : version.stop]
    return edits, reads


def _called(
    plan: ResolvedPlan, parts: list[WorkerResult], length: int, tokens: Sequence[int]
) -> tuple[Called, ...]:
    """Return the calls of each function, on the first rank of its stage."""
    if not plan.functions:
        return ()
    counts: dict[int, tuple[int, int]] = {}
    for part in sorted(parts, key=lambda part: part.worker.tensor_rank):
        for count in part.functions:
            counts.setdefault(count.index, (count.rows, count.calls))
    return tuple(
        Called(
            function.name,
            function.site,
            function.layer,
            _count(function.where.final(length, tokens)),
            *counts.get(index, (0, 0)),
        )
        for index, function in enumerate(plan.functions)
    )


def _expected(plan: ResolvedPlan, length: int, tokens: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the number of edits, and of probes, that the plan asks for at each position."""
    finals = {edit.where: edit.where.final(length, tokens) for edit in plan.edits}
    edits = _add_up((finals[edit.where] for edit in plan.edits), length)
    # The device counts a probe like an edit, and runs it wherever its score may be selected.
    counted = [probe for probe in plan.probes if probe.attention is None]
    # Those of gates with memory read the tokens of their edits alone.
    read = [
        probe.where.final(length, tokens) if probe.is_scan else clip(probe.where.possible, length)
        for probe in counted
    ]
    reads = _add_up(read, length)
    return edits, reads


def _unread(held: Sequence[HeldPlan], cached: NDArray[np.bool_]) -> list[str]:
    """Return a problem if the cache served a token that a search for marks had to read."""
    firsts = [automaton.start for version in held for automaton in version.plan.automata]
    missed = np.flatnonzero(cached[min(firsts, default=cached.size) :])
    return [f"{missed.size} generated tokens were not searched for marks"] if missed.size else []


def _missing(parts: list[WorkerResult]) -> list[str]:
    """Return a problem for each rank without results where another rank of its stage has some."""
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
    steps = np.zeros(length + 1, np.int64)
    for ranges in finals:
        for start, stop in ranges:
            steps[start] += 1
            steps[stop] -= 1
    return np.cumsum(steps[:length])


def _selected(plan: ResolvedPlan, length: int, tokens: Sequence[int]) -> tuple[Selected, ...]:
    every = [
        # Captures of every request have negative indices, as server-wide edits have.
        Selected(
            f"capture[{capture.source}]" if capture.source >= 0 else f"sinks[{capture.source}]",
            capture.where.final(length, tokens),
            _left_out(capture, length, tokens),
        )
        for capture in plan.captures
    ]
    # A capture whose rows are reduced may have been resolved to several.
    selections = list(dict.fromkeys(every))
    by_source: dict[int, list[tuple[int, int]]] = {}
    for edit in {(edit.source, edit.where): edit for edit in plan.edits}.values():
        by_source.setdefault(edit.source, []).extend(edit.where.final(length, tokens))
    selections += [
        Selected(path_of(source), clip(merge(ranges), length))
        for source, ranges in by_source.items()
    ]
    named = [probe for probe in plan.probes if probe.name]
    selections += [Selected(_path_of(probe), probe.where.final(length, tokens)) for probe in named]
    return tuple(selections)


def _selected_by_version(
    held: Sequence[HeldPlan], every: Sequence[Selected], length: int, tokens: Sequence[int]
) -> Iterator[Selected]:
    """Yield the selections of captures and probes, and of each version's edits where it held."""
    yield from (
        selected for selected in every if not selected.what.startswith(("edits[", "steering["))
    )
    for version in held:
        prefix = f"versions[{version.number}]."
        for selection in _selected(replace(version.plan, captures=(), probes=()), length, tokens):
            within = intersect(selection.positions, ((version.start, version.stop),))
            yield Selected(prefix + selection.what, clip(within, length))


def _path_of(probe: ResolvedProbe) -> str:
    return f"probes[{probe.source}]" if probe.source >= 0 else f"steering[{probe.source}]"


def _left_out(capture: ResolvedCapture, length: int, tokens: Sequence[int]) -> int:
    """Return the number of selected positions that `max_rows` left out."""
    if capture.selected is None:
        return 0
    kept = _count(capture.where.final(length, tokens))
    return _count(capture.selected.final(length, tokens)) - kept


def _count(ranges: Final) -> int:
    return sum(stop - start for start, stop in ranges)


class ReceiptReporter:
    """Collects receipts with problems, and reports them to the caller."""

    def __init__(self, config: Config) -> None:
        self._warn_dose = config.warn_dose
        self._warns = config.on_mismatch == "warn"
        self._receipts: list[Receipt] = []

    def add(self, output: Any) -> None:
        for completion in output.outputs:
            if completion.receipt.edited is not None:
                warn_of_doses(completion.receipt.edited.doses, self._warn_dose)
        self._receipts += [
            completion.receipt for completion in output.outputs if completion.receipt.problems
        ]

    def forget(self, request_ids: Container[str]) -> None:
        """Drop the receipts of requests, by the ids that their caller gave."""
        self._receipts = [
            receipt for receipt in self._receipts if receipt.request_id not in request_ids
        ]

    def report(self, outputs: Sequence[Any] = ()) -> None:
        """Report the problems, once; an error has the call's outputs."""
        receipts, self._receipts = self._receipts, []
        if not receipts:
            return
        complaints = [receipt.complaint for receipt in receipts]
        if not self._warns:
            raise ReceiptError("\n".join(complaints), outputs)
        for complaint in complaints:
            warnings.warn(complaint, ReceiptWarning, stacklevel=2)
