"""Norms of a store's activations by layer and by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.store import Selection, Store
from midstream.store.format.layout import tap_order
from midstream.viz import Chart, curve

PERCENTILES = (5, 50, 95)
# Largest number of rows read per site and layer; more would not visibly change the chart.
_MOST_ROWS = 4096
_MOST_ROWS_BY_POSITION = 16384
_AT_ONCE = 1024
_MOST_BINS = 48

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of norms along layers or positions."""

    name: str
    x: Floats  # layers or positions, ascending, [n]
    percentiles: Floats  # [n, 3]; see `PERCENTILES`


@dataclass(frozen=True, slots=True)
class NormSample:
    """Norms of a sample of a store's decoded rows: with `rp8` estimates, with `topk8` too small."""

    codec: str
    by_layer: tuple[Spread, ...]
    by_position: tuple[Spread, ...]  # of the first, middle and last layer of `site`
    site: str
    rows: int  # sampled, with a finite norm
    not_finite: int  # sampled, with a NaN or infinity, and left out
    request: str = ""  # empty: all

    def picture(self) -> Chart:
        """Return the medians by layer and by position, with the 5th and 95th percentiles."""
        of = f" of request {self.request[:60]}" if self.request else ""
        title = f"Norms of {self.rows:,} rows{of}, codec {self.codec}"
        if self.not_finite:
            title += f" ({self.not_finite:,} non-finite rows omitted)"
        by_position = _curves(self.by_position, f"by position, {self.site}", "position")
        charts = [_curves(self.by_layer, "by layer", "layer"), by_position]
        return Chart.beside(f"{title}: medians, 5th to 95th percentiles", charts)

    @staticmethod
    def of(store: Store, seed: int = 0, request: str = "") -> NormSample:
        if not store.sites:
            raise StoreError(f"{store.root}: there are no rows to draw")
        (codec, *others) = store.codecs
        if others:
            raise StoreError(
                f"{store.root}: cannot draw rows of different codecs together: "
                f"{', '.join(store.codecs)}"
            )
        rng = np.random.default_rng(seed)
        which_request = {"request": request} if request else {}
        norms: dict[str, dict[int, Floats]] = {}
        not_finite = 0
        for site, layer in sorted(_taps(store, request), key=tap_order):
            selection = store.select(site=site, layer=layer, **which_request)
            row_norms, _, left_out = _read(selection, _MOST_ROWS, rng)
            not_finite += left_out
            if len(row_norms):
                norms.setdefault(site, {})[layer] = row_norms
        if not norms:
            which = "finite " if not_finite else ""
            raise StoreError(f"{store.root}: there are no {which}rows to draw")
        site = "resid_post" if "resid_post" in norms else next(iter(norms))
        layers = sorted(norms[site])
        by_position = []
        for layer in dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1])):
            selection = store.select(site=site, layer=layer, **which_request)
            row_norms, positions, _ = _read(selection, _MOST_ROWS_BY_POSITION, rng)
            if len(row_norms):
                by_position.append(_by_position(f"layer {layer}", row_norms, positions))
        return NormSample(
            codec=codec,
            by_layer=tuple(_by_layer(name, norms[name]) for name in store.sites if name in norms),
            by_position=tuple(by_position),
            site=site,
            rows=sum(
                len(layer_norms) for of_site in norms.values() for layer_norms in of_site.values()
            ),
            not_finite=not_finite,
            request=request,
        )


def _curves(spreads: Sequence[Spread], title: str, x_title: str) -> Chart:
    """Return the medians of spreads, with their other percentiles as ranges."""
    x = np.unique(np.concatenate([spread.x for spread in spreads]))
    grids = {}
    for spread in spreads:
        grids[spread.name] = grid = np.full((3, len(x)), np.nan)
        grid[:, np.searchsorted(x, spread.x)] = spread.percentiles.T
    return curve(
        x,
        {name: grid[1] for name, grid in grids.items()},
        title=title,
        x_title=x_title,
        y_title="L2 norm",
        ranges={name: grid[::2] for name, grid in grids.items()},
        log=True,
    )


def _taps(store: Store, request: str) -> set[tuple[str, int]]:
    if request:
        return {
            tap
            for stored_request in store.requests
            if stored_request.request == request
            for tap in stored_request.taps
        }
    return {tap for shard in store.shards for group in shard.groups for tap in group.taps}


def _read(
    selection: Selection, most: int, rng: np.random.Generator
) -> tuple[Floats, NDArray[np.int64], int]:
    """Return norms and positions of up to `most` random rows, and how many were not finite."""
    count = min(len(selection), most)
    norms, positions = np.empty(count), np.empty(count, np.int64)
    chosen = np.sort(rng.choice(len(selection), count, replace=False))
    for start in range(0, count, _AT_ONCE):
        batch = selection.take(chosen[start : start + _AT_ONCE])
        part = slice(start, start + len(batch))
        # In float64 squares of finite values do not overflow.
        norms[part] = batch.values.norm(dim=1, dtype=torch.float64).numpy()
        positions[part] = batch.position.numpy()
    finite = np.isfinite(norms)
    return norms[finite], positions[finite], int(count - finite.sum())


def _by_layer(name: str, norms: Mapping[int, Floats]) -> Spread:
    layers = sorted(norms)
    percentiles = np.stack([np.percentile(norms[layer], PERCENTILES) for layer in layers])
    return Spread(name, np.array(layers, np.float64), percentiles)


def _by_position(name: str, norms: Floats, positions: NDArray[np.int64]) -> Spread:
    """Return the spread of each position, or of at most `_MOST_BINS` bins of positions."""
    last = int(positions.max())
    width = last // _MOST_BINS + 1
    bins = positions // width
    present = np.unique(bins)
    percentiles = np.stack(
        [np.percentile(norms[bins == bin_index], PERCENTILES) for bin_index in present]
    )
    middles = np.asarray(present * width + (width - 1) / 2, np.float64)
    return Spread(name, middles, percentiles)
