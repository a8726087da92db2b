"""How long the rows of a store are, by layer and by position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from midstream.errors import StoreError
from midstream.store import Selection, Store

PERCENTILES = (5, 25, 50, 75, 95)
# What is read of one site and layer; more would not change what is seen.
_MOST_ROWS = 4096
_MOST_ROWS_BY_POSITION = 16384
_AT_ONCE = 1024
_MOST_BINS = 48

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of norms, along something.

    Attributes:
        name: of what they are.
        x: [n], ascending.
        percentiles: [n, 5]; see `PERCENTILES`.
    """

    name: str
    x: Floats
    percentiles: Floats


@dataclass(frozen=True, slots=True)
class Norms:
    """What is drawn of a store.

    Attributes:
        codec: of its rows. What it reduces are norms of what is left: of `rp8` an estimate, of
            `topk8` a little less.
        by_layer: one for each site.
        by_position: the first, middle and last layer of one site.
        site: that site.
        rows: how many were read.
    """

    codec: str
    by_layer: tuple[Spread, ...]
    by_position: tuple[Spread, ...]
    site: str
    rows: int

    @staticmethod
    def of(store: Store, seed: int = 0) -> Norms:
        """Reads some of the rows of each site and layer, chosen by chance.

        Raises:
            StoreError: there are none, they are not all of one kind, or they are damaged.
        """
        if not store.sites:
            raise StoreError(f"{store.root}: there are no rows to draw")
        (codec, *others) = store.codecs
        if others:
            raise StoreError(
                f"{store.root}: rows of different codecs are not drawn together: {store.codecs}"
            )
        chance = np.random.default_rng(seed)
        norms: dict[str, dict[int, Floats]] = {}
        for site in store.sites:
            for layer in store.layers:
                found, _ = _read(_selection(store, site, layer), _MOST_ROWS, chance)
                if len(found):
                    norms.setdefault(site, {})[layer] = found
        if not norms:
            raise StoreError(f"{store.root}: there are no rows to draw")
        site = "resid_post" if "resid_post" in norms else next(iter(norms))
        layers = sorted(norms[site])
        by_position = []
        for layer in dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1])):
            selection = _selection(store, site, layer)
            found, positions = _read(selection, _MOST_ROWS_BY_POSITION, chance)
            by_position.append(_by_position(f"layer {layer}", found, positions))
        return Norms(
            codec=codec,
            by_layer=tuple(_by_layer(name, of_site) for name, of_site in norms.items()),
            by_position=tuple(by_position),
            site=site,
            rows=sum(len(each) for of_site in norms.values() for each in of_site.values()),
        )


def _selection(store: Store, site: str, layer: int) -> Selection | None:
    return store.select(site=site, layer=layer) if (site, layer) in _taps(store) else None


def _taps(store: Store) -> set[tuple[str, int]]:
    return {tap for shard in store.shards for group in shard.groups for tap in group.taps}


def _read(
    selection: Selection | None, most: int, chance: np.random.Generator
) -> tuple[Floats, NDArray[np.int64]]:
    """Norms of some rows, and their positions."""
    count = 0 if selection is None else len(selection)
    norms, positions = np.empty(min(count, most)), np.empty(min(count, most), np.int64)
    if selection is not None:
        chosen = np.sort(chance.choice(count, len(norms), replace=False))
        for start in range(0, len(chosen), _AT_ONCE):
            batch = selection.take(chosen[start : start + _AT_ONCE])
            part = slice(start, start + len(batch))
            norms[part] = batch.values.float().norm(dim=1).numpy()
            positions[part] = batch.position.numpy()
    return norms, positions


def _by_layer(name: str, norms: Mapping[int, Floats]) -> Spread:
    layers = sorted(norms)
    percentiles = np.stack([np.percentile(norms[layer], PERCENTILES) for layer in layers])
    return Spread(name, np.array(layers, np.float64), percentiles)


def _by_position(name: str, norms: Floats, positions: NDArray[np.int64]) -> Spread:
    """Each position by itself, or, where there are many, as many bins as one can tell apart."""
    last = int(positions.max())
    width = last // _MOST_BINS + 1
    bins = positions // width
    there = np.unique(bins)
    percentiles = np.stack([np.percentile(norms[bins == one], PERCENTILES) for one in there])
    middles = np.asarray(there * width + (width - 1) / 2, np.float64)
    return Spread(name, middles, percentiles)
