"""Rows of attention, lenses, features and logits among those of a completion, as the caller gets
them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from midstream.results.activations import Activations
from midstream.results.attention import AttentionResults, AttentionRows, Key
from midstream.results.features import FeatureResults, FeatureRows
from midstream.results.gathered_rows import GatheredRows
from midstream.results.lens import LensResults, LensRows
from midstream.results.logits import LogitRows
from midstream.runtime.frontend.admitted import AdmittedRequest
from midstream.runtime.frontend.results.reduced import with_reduced
from midstream.sites import Tap
from midstream.spec.readouts.attention import Attention
from midstream.spec.readouts.features import Features
from midstream.spec.readouts.lens import Lens
from midstream.spec.readouts.logits import Logits
from midstream.spec.readouts.reduced import is_reduced
from midstream.spec.resolved import Pattern, ResolvedCapture
from midstream.spec.selection import Layers

_WORDS = {"top": "top_keys"}


class Parted(NamedTuple):
    """Rows of a completion by their kind; None where there are none."""

    activations: Activations | None
    attention: AttentionResults | None = None
    logits: LogitRows | None = None
    lens: LensResults | None = None
    features: FeatureResults | None = None


def parted(rows: Activations | None, admitted: AdmittedRequest) -> Parted:
    """Return the captured vectors among some rows, the attention, the logits, the lenses and
    the features.
    """
    widths = admitted.plan.pattern_widths
    if rows is None or not any(tap in widths for tap in rows):
        return Parted(rows)
    assert admitted.own is not None
    attention_rows: dict[Key, AttentionRows] = {}
    lenses: dict[str, LensRows] = {}
    features: dict[str, FeatureRows] = {}
    logits = None
    for capture in admitted.plan.captures:
        if capture.pattern is None or is_reduced(capture):
            continue
        asked = admitted.own.captures[capture.source]
        if isinstance(asked, Logits):
            if capture.taps[0] in rows.counts():
                logits = _logits_of(rows, capture, asked)
            continue
        if isinstance(asked, Lens):
            if capture.taps[0] in rows.counts():
                lenses[asked.name] = _lens_of(rows, capture, asked)
            continue
        if isinstance(asked, Features):
            if capture.taps[0] in rows.counts():
                features[asked.name] = _features_of(rows, capture, asked.top)
            continue
        assert isinstance(asked, Attention)
        for place, tap in enumerate(capture.taps):
            if tap in rows.counts():
                count = capture.pattern.counts[place]
                attention_rows[asked.name, tap[1]] = _rows_of(
                    rows, tap, capture.pattern, count, asked.heads
                )
    attention = AttentionResults(attention_rows, rows.num_layers) if attention_rows else None
    lens = LensResults(lenses) if lenses else None
    active = FeatureResults(features) if features else None
    vectors = with_reduced(_vectors(rows, widths), rows, admitted.plan)
    return Parted(vectors, attention, logits, lens, active)


def _logits_of(rows: Activations, capture: ResolvedCapture, asked: Logits) -> LogitRows:
    """Return the logits of a completion, in memory of their own."""
    (tap,) = capture.taps
    values = rows[tap].as_subclass(torch.Tensor).clone()
    positions = rows.positions_of(*tap).clone()
    values, total = values[:, :-1], values[:, -1]
    count = values.shape[1]
    if asked.top:
        count //= 2
        ids = values[:, :count].contiguous().view(torch.int32).long()
        return LogitRows(values[:, count:], ids, total, positions)
    if isinstance(asked.tokens, str):
        return LogitRows(values, torch.arange(count).expand(len(values), -1), total, positions)
    assert capture.pattern is not None
    chosen = torch.tensor([token for token, _ in capture.pattern.keys])
    return LogitRows(values, chosen.expand(len(values), -1), total, positions)


def _lens_of(rows: Activations, capture: ResolvedCapture, asked: Lens) -> LensRows:
    """Return the rows of a lens, in memory of their own, with the layers as they are listed."""
    assert capture.pattern is not None
    tokens, top = tuple(token for token, _ in capture.pattern.keys), asked.top
    taps = {tap[1]: tap for tap in capture.taps}
    layers = _as_listed(sorted(taps), asked.layers)
    every = torch.stack([rows[taps[layer]].as_subclass(torch.Tensor) for layer in layers], 1)
    ids, values, chosen, ranks, total = every.split([top, top, len(tokens), len(tokens), 1], -1)
    return LensRows(
        values.clone(),
        ids.contiguous().view(torch.int32).long(),
        tokens,
        chosen.clone(),
        ranks.contiguous().view(torch.int32).long(),
        total[..., 0].clone(),
        rows.positions_of(*capture.taps[0]).clone(),
        layers,
    )


def _as_listed(layers: list[int], asked: Layers) -> tuple[int, ...]:
    """Return layers in the order in which a request lists them.

    Args:
        layers: the layers, from 0, ascending.
        asked: the same as listed; a negative layer is counted from the last.
    """
    if asked.indices == "all":
        return tuple(layers)
    from_end = sorted(layer for layer in asked.indices if layer < 0)
    rest = [layer for layer in layers if layer not in asked.indices]
    named = dict(zip(from_end, rest, strict=True))
    return tuple(named.get(layer, layer) for layer in asked.indices)


def _features_of(rows: Activations, capture: ResolvedCapture, top: int) -> FeatureRows:
    """Return the rows of an SAE, in memory of their own."""
    pattern = capture.pattern
    assert pattern is not None
    (tap,) = capture.taps
    features = tuple(feature for feature, _ in pattern.keys)
    every = rows[tap].as_subclass(torch.Tensor)
    ids, values, chosen, number = every.split([top, top, len(features), 1], -1)
    return FeatureRows(
        ids.contiguous().view(torch.int32).long(),
        values.clone(),
        features,
        chosen.clone(),
        number.contiguous().view(torch.int32).long()[:, 0],
        rows.positions_of(*tap).clone(),
        *pattern.reads[0],
    )


def _vectors(rows: Activations, patterns: dict[Tap, int]) -> Activations | None:
    """Return the rows without those of attention; None if there are no others."""
    taps = [tap for tap in rows if tap not in patterns]
    if not taps:
        return None
    given_rows = rows._given  # noqa: SLF001
    tokens = rows._given_tokens  # noqa: SLF001
    if not isinstance(given_rows, GatheredRows):
        values = {tap: given_rows[tap] for tap in taps}
        positions = {tap: rows.positions_of(*tap) for tap in taps}
        return Activations(values, positions, tokens, rows.num_layers, rows.heads)
    # Rows of attention are in groups of their own, as they have another form.
    groups = [group for group in given_rows.groups if group.taps[0] not in patterns]
    mine = GatheredRows(taps, groups)
    return Activations(mine, mine.positions(), tokens, rows.num_layers, rows.heads)


def _rows_of(
    rows: Activations, tap: Tap, pattern: Pattern, count: int, asked: tuple[int, ...] | None
) -> AttentionRows:
    """Return the rows of attention of one layer, in memory of their own.

    Args:
        count: number of heads that a row has.
        asked: the heads that the caller gets; None: all.
    """
    values = rows[tap].as_subclass(torch.Tensor).unflatten(1, (count, pattern.size))
    heads = tuple(range(count)) if asked is None else asked
    if asked is not None:
        # A row has the heads of the pattern, ascending, or all of them.
        computed = pattern.heads or range(count)
        values = values[:, [computed.index(head) for head in asked]]
    positions = rows.positions_of(*tap).clone()
    keys = None
    match pattern.kind:
        case "top":
            k = pattern.size // 2
            keys = values[..., :k].contiguous().view(torch.int32).long()
            values = values[..., k:]
        case "full" | "scores":
            values = values[..., : int(positions[-1]) + 1 if len(positions) else 0]
        case _:
            values = values[..., 0]
    word = _WORDS.get(pattern.kind, pattern.kind)
    return AttentionRows(word, values.clone(), keys, positions, heads)
