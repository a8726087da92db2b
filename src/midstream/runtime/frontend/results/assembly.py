"""Activations, probe scores and receipts of one request, from the results of the workers."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from midstream.codecs import Raw, parse_codec
from midstream.plan import ModelShape, ResolvedPlan, ResolvedProbe
from midstream.plan.resolved import Final
from midstream.plan.scores.rule import NO_TOKENS
from midstream.results.activations import Activations
from midstream.results.encoded_rows import Rows
from midstream.results.gathered_rows import GatheredRows, RowGroup, numbers_of
from midstream.results.probe_scores import Probes
from midstream.results.receipt import Receipt
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.results.actions import Sent, tokens_of_rows
from midstream.runtime.frontend.results.doses import doses_of
from midstream.runtime.frontend.results.receipts import EndedCompletion, make_receipt
from midstream.runtime.protocol.rank_parts import joined_blocks, probe_numbers
from midstream.runtime.protocol.record_layout import BlockForm
from midstream.runtime.protocol.results import (
    ResultBlock,
    WorkerAnswers,
    WorkerResult,
    split,
)
from midstream.runtime.protocol.runs import Ints, expand
from midstream.sites import Tap

# Positions, ascending, that captures select, by the indices of the captures.
Select = Callable[[tuple[int, ...]], Ints]


@dataclass(frozen=True, slots=True)
class CompletionResults:
    """Results of one completion."""

    # All captured rows, or those that arrived at the end if earlier ones were delivered and are not
    # kept; None: the plan has no captures.
    activations: Activations | None
    probes: Probes | None
    receipt: Receipt
    blocks: Sequence[ResultBlock]  # captured rows that arrived at the end
    tokens: list[int]


def assemble(
    output: Any,
    admitted: AdmittedRequest,
    answers: WorkerAnswers,
    shape: ModelShape,
    before: Mapping[int, Sequence[ResultBlock]] = MappingProxyType({}),
) -> dict[int, CompletionResults]:
    """Return the results by completion; `before`: rows that arrived already, maybe without data."""
    plan, own = admitted.plan, admitted.own
    reused, later = admitted.reused, admitted.later
    children = split(answers, len(output.outputs))
    coming_from = () if own is None else own.coming_from
    results = {}
    for completion in output.outputs:
        parts = children.get(completion.index, [])
        sent = [(part.worker, *entry) for part in parts for entry in part.scores()]
        controller = None if own is None else own.controller
        tokens = tokens_of_rows(output, completion, plan, sent, controller)
        probes = _probes(plan, sent, tokens)
        ended = EndedCompletion(completion, parts, tokens, probes)
        earlier = before.get(completion.index, ())
        kept: list[ResultBlock] = []
        # Receipts of reduced rows, and of what probes do, depend on values.
        acts = any(probe.act is not None for probe in plan.probes)
        if earlier or reused is not None or later or acts or plan.reduced:
            nothing = _no_rows_once(plan, shape)
            computed = joined_blocks(parts) if plan.captures else []
            kept = [] if reused is None else reused.missing(computed, tokens)
            blocks = [*computed, *kept]
            every = _activations(plan, [*earlier, *blocks], tokens, nothing)
            is_bare = any(block.is_bare for block in earlier)
            activations = _activations(plan, blocks, tokens, nothing) if is_bare else every
            receipt = make_receipt(output.request_id, plan, ended, every, coming_from, later)
        else:
            ending = len(completion.token_ids), completion.finish_reason, completion.stop_reason
            key = ("results", *[part.outline for part in parts], coming_from, *ending)
            args = plan, ended, shape, coming_from
            shared = plan.remember(key, len(tokens), functools.partial(_shared_results, *args))
            blocks = shared.blocks(plan, parts)
            activations = shared.activations(plan, blocks, tokens)
            receipt = shared.receipt.of_request(output.request_id)
        if any(part.has_doses for part in parts):
            receipt = receipt.with_doses(doses_of(plan, parts, len(tokens), later))
        if activations is not None:
            activations.num_layers = shape.num_layers
        if reused is not None:
            counts: Counter[Tap] = Counter()
            for block in kept:
                counts.update(dict.fromkeys(block.taps, block.positions.size))
            receipt = receipt.with_reused(counts)
            resets = max(answer.header.resets for answer in answers)
            same = not later and all(part.resets == resets for part in parts)
            if receipt.status == "ok" and same:
                reused.keep(computed, tokens, resets)
        results[completion.index] = CompletionResults(activations, probes, receipt, blocks, tokens)
    return results


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the rows of taps that were captured at the same positions are; see `RowGroup`."""

    taps: tuple[Tap, ...]
    positions: Ints  # ascending
    blocks: tuple[int, ...]  # indices of those that have the rows
    chosen: Tensor | None
    nothing: Rows


@dataclass(frozen=True, slots=True)
class _SharedResults:
    """What is equal in the results of completions of one plan of which the workers say the same."""

    receipt: Receipt
    places: tuple[_Places, ...]
    numbers: Mapping[Tap, int]  # index of each tap's place
    # Of each block, the index of its worker's results and its form; None: see `WorkerResult.forms`.
    forms: tuple[tuple[int, BlockForm], ...] | None

    def blocks(self, plan: ResolvedPlan, parts: Sequence[WorkerResult]) -> list[ResultBlock]:
        if self.forms is None:
            return joined_blocks(parts) if plan.captures else []
        return [parts[index].block(form) for index, form in self.forms]

    def activations(
        self, plan: ResolvedPlan, blocks: Sequence[ResultBlock], tokens: list[int]
    ) -> Activations | None:
        if not plan.captures:
            return None
        return _gathered(plan, self.places, blocks, tokens, self.numbers)


def _shared_results(
    plan: ResolvedPlan,
    ended: EndedCompletion,
    shape: ModelShape,
    coming_from: tuple[tuple[str, str], ...],
) -> _SharedResults:
    parts, tokens = ended.parts, ended.tokens
    nothing = _no_rows_once(plan, shape)
    blocks = joined_blocks(parts) if plan.captures else []
    every = _activations(plan, blocks, tokens, nothing)
    receipt = make_receipt("", plan, ended, every, coming_from)
    if not plan.captures:
        return _SharedResults(receipt, (), {}, ())
    places = tuple(_places(plan, blocks, select_final(plan, tokens), nothing))
    return _SharedResults(receipt, places, numbers_of(plan.taps, places), _forms(parts))


def _forms(parts: Sequence[WorkerResult]) -> tuple[tuple[int, BlockForm], ...] | None:
    """Return the forms of all blocks, in the order of `joined_blocks`; None: one has no form."""
    block_forms: list[tuple[int, BlockForm]] = []
    for index, part in enumerate(parts):
        forms = part.forms()
        if forms is None:
            return None
        block_forms += [(index, form) for form in forms]
    return tuple(block_forms)


def _no_rows_once(plan: ResolvedPlan, shape: ModelShape) -> dict[Tap, Rows]:
    return plan.remember(("no rows", shape.dtype), 0, lambda: no_rows(plan, shape))


def no_rows(plan: ResolvedPlan, shape: ModelShape) -> dict[Tap, Rows]:
    """Return encoded rows of each captured tap, without any; one object for each form of rows."""
    codec, dtype = parse_codec(plan.codec), getattr(torch, shape.dtype)
    if not shape.widths and not plan.pattern_widths:
        return dict.fromkeys(plan.taps, Rows(codec, shape.hidden_size, dtype, (), ()))
    vectors: dict[int, Rows] = {}
    patterns: dict[int, Rows] = {}
    rows = {}
    for tap in plan.taps:
        numbers = plan.pattern_widths.get(tap)
        if numbers is None:
            width = shape.width(tap)
            rows[tap] = vectors.setdefault(width, Rows(codec, width, dtype, (), ()))
        else:
            row = Rows(Raw(), numbers, torch.float32, (), ())
            rows[tap] = patterns.setdefault(numbers, row)
    return rows


def _of_one_form(taps: Sequence[Tap], nothing: Mapping[Tap, Rows]) -> list[list[Tap]]:
    groups: dict[int, list[Tap]] = {}
    for tap in taps:
        groups.setdefault(id(nothing[tap]), []).append(tap)
    return list(groups.values())


def _activations(
    plan: ResolvedPlan,
    blocks: Sequence[ResultBlock],
    tokens: list[int],
    nothing: Mapping[Tap, Rows],
) -> Activations | None:
    if not plan.captures:
        return None
    return activations_of(plan, blocks, select_final(plan, tokens), tokens, nothing)


def select_final(plan: ResolvedPlan, tokens: Sequence[int]) -> Select:
    """Return the function that gives the positions selected by captures of an ended completion."""
    length = len(tokens)

    def select(captures: tuple[int, ...]) -> Ints:
        def make() -> Ints:
            return _expanded(plan.ranges_of(captures, length, tokens))

        return plan.remember(("selected", captures), length, make)

    return select


def _expanded(ranges: Final) -> Ints:
    """Return the positions in ranges as an array that may be shared: it cannot be changed."""
    positions = expand(ranges)
    positions.setflags(write=False)
    return positions


def activations_of(
    plan: ResolvedPlan,
    blocks: Sequence[ResultBlock],
    select: Select,
    tokens: Tensor | Sequence[int],
    nothing: Mapping[Tap, Rows],
) -> Activations:
    """Return blocks' captured rows at positions from `select`; `nothing`: see `no_rows`."""
    places = _places(plan, blocks, select, nothing)
    return _gathered(plan, places, blocks, tokens)


def _places(
    plan: ResolvedPlan,
    blocks: Sequence[ResultBlock],
    select: Select,
    nothing: Mapping[Tap, Rows],
) -> list[_Places]:
    places = []
    for captures, taps in plan.alike:
        selected = select(captures)
        for alike in _of_one_form(taps, nothing):
            for together, mine in _found_together(alike, blocks):
                there, chosen = _choose([blocks[index].positions for index in mine], selected)
                places.append(_Places(together, there, mine, chosen, nothing[together[0]]))
    return places


def _gathered(
    plan: ResolvedPlan,
    places: Sequence[_Places],
    blocks: Sequence[ResultBlock],
    tokens: Tensor | Sequence[int],
    numbers: Mapping[Tap, int] | None = None,
) -> Activations:
    groups = [
        RowGroup(at.taps, at.positions, [blocks[i] for i in at.blocks], at.chosen, at.nothing)
        for at in places
    ]
    rows = GatheredRows(plan.taps, groups, numbers)
    return Activations(rows, rows.positions(), tokens)


def _probes(plan: ResolvedPlan, sent: Sent, tokens: Sequence[int]) -> Probes | None:
    scores: dict[str, Tensor] = {}
    positions: dict[str, Tensor] = {}
    outputs: dict[str, tuple[str, ...]] = {}
    chosen_of: dict[Hashable, Any] = {}  # by selection and positions, which live as long as this
    for probe in plan.probes:
        if not probe.name:
            continue
        blocks = probe_numbers(probe, sent)
        key = probe.where, *[id(known) for known, _ in blocks]
        if key not in chosen_of:
            select = functools.partial(_selected_by, probe, tokens)
            wanted = plan.remember(("probe", probe.name), len(tokens), select)
            chosen_of[key] = _choose([known for known, _ in blocks], wanted), blocks
        (there, chosen), _ = chosen_of[key]
        # A copy: the worker's bytes are read-only, and of all probes.
        nothing = np.zeros((0, probe.rule.columns), np.float32)
        numbers = np.concatenate([nothing, *(values for _, values in blocks)])
        numbers = numbers if chosen is None else numbers[chosen.numpy()]
        _, made = probe.rule.follow(NO_TOKENS, numbers)
        scores[probe.name] = torch.from_numpy(made)
        positions[probe.name] = torch.from_numpy(there)
        if probe.outputs:
            outputs[probe.name] = probe.outputs
    if not scores:
        return None
    return Probes(scores, positions, tokens, outputs)


def _selected_by(probe: ResolvedProbe, tokens: Sequence[int]) -> Ints:
    return _expanded(probe.where.final(len(tokens), tokens))


def _found_together(
    taps: Sequence[Tap], blocks: Sequence[ResultBlock]
) -> list[tuple[tuple[Tap, ...], tuple[int, ...]]]:
    """Group taps that occur in the same blocks; return each group with its blocks' indices."""
    present = [set(block.taps) for block in blocks]
    if all(there.issuperset(taps) for there in present):
        return [(tuple(taps), tuple(range(len(blocks))))]
    together: dict[tuple[int, ...], list[Tap]] = {}
    for tap in taps:
        key = tuple([index for index, there in enumerate(present) if tap in there])
        together.setdefault(key, []).append(tap)
    return [(tuple(group), indices) for indices, group in together.items()]


def _choose(
    block_positions: list[NDArray[np.int64]], wanted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], Tensor | None]:
    """Return the selected positions, ascending, and their rows' indices, None: all in order."""
    if not block_positions:
        return np.zeros(0, np.int64), None
    # Both are int64. NumPy's comparison takes many times as long.
    if len(block_positions) == 1 and block_positions[0].tobytes() == wanted.tobytes():
        return block_positions[0], None
    positions = np.concatenate(block_positions)
    rising = np.argsort(positions, kind="stable")
    chosen = rising[np.isin(positions[rising], wanted)]
    if np.array_equal(chosen, np.arange(positions.size)):
        return positions, None
    return positions[chosen], torch.from_numpy(chosen)
