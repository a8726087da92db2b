"""Rows of read-outs among those of a completion, as the caller gets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from midstream.plan import ResolvedPlan
from midstream.plan.readouts.reduced import RETURNED, is_reduced
from midstream.plan.resolved import Pattern, ResolvedCapture
from midstream.results.activations import Activations
from midstream.results.encoded_rows import Rows
from midstream.results.gathered_rows import GatheredRows
from midstream.results.readouts import RESULTS
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.sites import Tap, order

_NONE: Mapping[str, Any] = dict.fromkeys(RESULTS)


class Parted(NamedTuple):
    """Rows of a completion by their kind; `readouts` by the attribute of outputs."""

    activations: Activations | None
    readouts: Mapping[str, Any] = _NONE


def parted(rows: Activations | None, admitted: AdmittedRequest) -> Parted:
    """Return the captured vectors among some rows, and the results of read-outs."""
    widths = admitted.plan.pattern_widths
    if rows is None or not any(tap in widths for tap in rows):
        return Parted(rows)
    assert admitted.own is not None
    by_kind: dict[str, list[tuple[ResolvedCapture, Any]]] = {}
    for capture in admitted.plan.captures:
        if capture.pattern is not None and not is_reduced(capture):
            asked = admitted.own.captures[capture.source]
            by_kind.setdefault(capture.kind, []).append((capture, asked))
    readouts = {key: RESULTS[key].decode(rows, mine) for key, mine in by_kind.items()}
    vectors = with_reduced(_vectors(rows, widths), rows, admitted.plan)
    if vectors is not None:
        vectors.source = admitted.source
    return Parted(vectors, {**_NONE, **readouts})


def _vectors(rows: Activations, patterns: dict[Tap, int]) -> Activations | None:
    """Return the rows without those of attention; None if there are no others."""
    taps = [tap for tap in rows if tap not in patterns]
    if not taps:
        return None
    held, tokens = rows.held.values, rows.held.tokens
    if not isinstance(held, GatheredRows):
        values = {tap: held[tap] for tap in taps}
        positions = {tap: rows.positions_of(*tap) for tap in taps}
        return Activations(values, positions, tokens, *_shown(rows))
    # Rows of attention are in groups of their own, as they have another form.
    groups = [group for group in held.groups if group.taps[0] not in patterns]
    mine = GatheredRows(taps, groups)
    return Activations(mine, mine.positions(), tokens, *_shown(rows))


def _shown(rows: Activations) -> tuple[Any, ...]:
    return rows.num_layers, rows.heads, rows.positions_of_media


def num_reduced(rows: Activations, plan: ResolvedPlan) -> dict[Tap, int]:
    """Return the number of rows that each reduced row is made of, by its tap in the plan."""
    num_rows = {}
    for capture in plan.captures:
        pattern = capture.pattern
        if pattern is None or not pattern.reduces:
            continue
        for place, tap in enumerate(capture.taps):
            if tap in rows.counts():
                counts = _parts(rows, tap, pattern, place)[..., 0].contiguous().view(torch.int32)
                # Ranks with parts of a row have counted the same rows.
                num_rows[tap] = int(counts.min()) if counts.numel() else 0
    return num_rows


def with_reduced(
    whole: Activations | None, rows: Activations, plan: ResolvedPlan
) -> Activations | None:
    """Return captured vectors, if any, with reduced rows, by sites and layers of the engine."""
    captures = [capture for capture in plan.captures if is_reduced(capture)]
    if not captures:
        return whole
    values: dict[Tap, Tensor | Rows] = {}
    positions: dict[Tap, Tensor] = {}
    if whole is not None:
        for tap in whole:
            values[tap] = whole.held.rows(tap)
            positions[tap] = whole.positions_of(*tap)
    for capture in captures:
        for place, tap in enumerate(capture.taps):
            if tap in rows.counts():
                assert capture.pattern is not None
                read = capture.pattern.reads[place]
                values[read], positions[read] = _reduced(rows, tap, capture, place)
    if not values:
        return whole
    values = {tap: values[tap] for tap in sorted(values, key=order)}
    return Activations(values, positions, rows.held.tokens, *_shown(rows))


def _parts(rows: Activations, tap: Tap, pattern: Pattern, place: int) -> Tensor:
    """Return the parts of a tap's reduced rows, float32 [rows, parts, size]."""
    values: Tensor = rows[tap].as_subclass(torch.Tensor)
    return values.view(-1, pattern.counts[place], pattern.size)


def _reduced(
    rows: Activations, tap: Tap, capture: ResolvedCapture, place: int
) -> tuple[Tensor, Tensor]:
    """Return the values of reduced rows, in memory of their own, and their positions."""
    pattern = capture.pattern
    assert pattern is not None
    positions = rows.positions_of(*tap)
    if not pattern.reduces:
        return rows[tap].as_subclass(torch.Tensor).clone(), positions.clone()
    num_returned = RETURNED[pattern.kind]
    # [rows, parts, numbers, components] to [rows · numbers, width].
    parts = _parts(rows, tap, pattern, place)[..., 1:].unflatten(2, (num_returned, -1))
    return parts.transpose(1, 2).flatten(2).flatten(0, 1).clone(), positions.repeat_interleave(
        num_returned
    )
