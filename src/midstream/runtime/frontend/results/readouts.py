"""Rows of read-outs among those of a completion, as the caller gets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from midstream.plan.readouts.reduced import is_reduced
from midstream.plan.resolved import ResolvedCapture
from midstream.results.activations import Activations
from midstream.results.gathered_rows import GatheredRows
from midstream.results.readouts import RESULTS
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.results.reduced import with_reduced
from midstream.sites import Tap

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
        return Activations(values, positions, tokens, rows.num_layers, rows.heads)
    # Rows of attention are in groups of their own, as they have another form.
    groups = [group for group in held.groups if group.taps[0] not in patterns]
    mine = GatheredRows(taps, groups)
    return Activations(mine, mine.positions(), tokens, rows.num_layers, rows.heads)
