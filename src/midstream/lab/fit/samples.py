"""Rows of two classes, read one layer and one block at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.lab.fit.folds import Indices, number
from midstream.plan.vectors.vector import check_unmasked
from midstream.results.arrays import to_numpy
from midstream.validation import at, kind, read_int

if TYPE_CHECKING:
    from midstream.store.selection import Selection

BLOCK = 1024
"""Rows that are read at a time. Both classes have the same blocks, so those of pairs line up."""


class Samples(Protocol):
    """The rows of one class, at several layers."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, ascending."""

    @property
    def width(self) -> int:
        """Size of a row."""

    def __len__(self) -> int:
        """Return the number of rows at each layer."""

    def blocks(self, layer: int) -> Iterator[NDArray[Any]]:
        """Yield the rows of a layer in order, [at most BLOCK, width], any float dtype."""


@dataclass(frozen=True)
class ArraySamples:
    """Rows in memory, [rows, width] by layer."""

    rows: Mapping[int, NDArray[Any]]

    @staticmethod
    def read(path: str, value: object, layers: object) -> ArraySamples:
        """Read rows [rows, layers, width], or {layer: [rows, width]}; no `layers`: 0, 1, …."""
        if isinstance(value, Mapping):
            if layers is not None:
                raise SpecError("layers", f"`{path}` is a dict by layer, which has them; omit it")
            layers_of = [_layer(path, key) for key in value]
            if len(set(layers_of)) < len(layers_of):
                raise SpecError(path, f"expected each layer once, got {layers_of}")
            pairs = zip(layers_of, value.values(), strict=True)
            arrays = {layer: _floats(path, rows, 2) for layer, rows in pairs}
        else:
            array = _floats(path, value, 3)
            indices = list(range(array.shape[1])) if layers is None else read_layers(layers)
            if len(indices) != array.shape[1] or len(set(indices)) < len(indices):
                raise SpecError(
                    "layers",
                    f"expected {array.shape[1]} distinct layers, one for each of `{path}`'s second "
                    f"dimension, got {indices}",
                )
            arrays = {layer: array[:, column] for column, layer in enumerate(indices)}
        if not arrays or min(arrays) < 0:
            raise SpecError(path, "expected layers from 0, and at least one")
        if len({rows.shape for rows in arrays.values()}) > 1:
            raise SpecError(path, "expected as many rows, of one width, at every layer")
        return ArraySamples(dict(sorted(arrays.items())))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(self.rows)

    @property
    def width(self) -> int:
        return int(next(iter(self.rows.values())).shape[1])

    def __len__(self) -> int:
        return len(next(iter(self.rows.values())))

    def blocks(self, layer: int) -> Iterator[NDArray[Any]]:
        rows = self.rows[layer]
        for start in range(0, len(rows), BLOCK):
            yield rows[start : start + BLOCK]


@dataclass(frozen=True)
class StoredSamples:
    """Rows of a store's selection, which are read block by block."""

    selection: Selection
    path: str
    starts: Mapping[int, int] = field(init=False)  # by layer, its first row in the selection
    count: int = field(init=False)

    def __post_init__(self) -> None:
        """Raises SpecError if the selection is empty or has several sites, or numbers of rows."""
        counts: dict[int, int] = {}
        for segment in self.selection.segments:
            counts[segment.tap[1]] = counts.get(segment.tap[1], 0) + len(segment.rows)
        sites = {site for site, _ in self.selection.taps}
        if len(sites) != 1:
            raise SpecError(
                self.path,
                f"expected rows of one site, got {', '.join(sorted(sites)) or 'no rows'}; select "
                "one with `site`",
            )
        if len(set(counts.values())) > 1:
            shown = ", ".join(f"{count} at layer {layer}" for layer, count in counts.items())
            raise SpecError(self.path, f"expected as many rows at every layer, got {shown}")
        self._check_requests()
        ends = np.cumsum([0, *counts.values()])
        starts = dict(zip(counts, map(int, ends), strict=False))
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "count", next(iter(counts.values())))

    @property
    def site(self) -> str:
        return self.selection.taps[0][0]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted(self.starts))

    @property
    def width(self) -> int:
        return self.selection.width()

    def __len__(self) -> int:
        return self.count

    def blocks(self, layer: int) -> Iterator[NDArray[Any]]:
        first = self.starts[layer]
        for start in range(first, first + self.count, BLOCK):
            stop = min(start + BLOCK, first + self.count)
            yield self.selection.take(np.arange(start, stop)).numpy()

    def _check_requests(self) -> None:
        """Check that the rows of all layers are of the same requests, in the same order."""
        parts: dict[int, list[tuple[str, int, Indices]]] = {}
        for segment in self.selection.segments:
            parts.setdefault(segment.tap[1], []).append(
                (segment.shard.name, segment.group, segment.rows)
            )
        first, *others = parts
        owners = None
        for layer in others:
            # Layers that were captured together share their index.
            if [(*part[:2], id(part[2])) for part in parts[layer]] == [
                (*part[:2], id(part[2])) for part in parts[first]
            ]:
                continue
            owners = self._owners(first) if owners is None else owners
            if self._owners(layer) != owners:
                raise SpecError(
                    self.path,
                    f"the rows at layer {layer} are of other requests than those at layer {first}; "
                    "select requests with rows at every layer, or one layer at a time",
                )

    def _owners(self, layer: int) -> list[tuple[str, list[int]]]:
        """Return the shards of a layer's rows, and the completion of each row by its index."""
        shards: list[tuple[str, list[int]]] = []
        for segment in self.selection.segments:
            if segment.tap[1] == layer:
                owners, bounds = segment.shard.owners(segment.group)
                completions = owners[np.searchsorted(bounds, segment.rows, side="right") - 1]
                if shards and shards[-1][0] == segment.shard.name:
                    shards[-1][1].extend(completions.tolist())
                else:
                    shards.append((segment.shard.name, completions.tolist()))
        return shards

    def requests(self) -> list[str]:
        """Return the request of each row of a layer, as all layers have them."""
        first = next(iter(self.starts.values()))
        return self.selection.take(np.arange(first, first + self.count)).request


def pair_up(
    positive: list[Any], negative: list[Any], counts: tuple[int, int]
) -> tuple[Indices, Indices]:
    """Number the groups of the rows of two classes, int64 [rows] each, from a key of each row.

    A key of both classes is one group; else the k-th keys of both are, if they have as many.
    """
    if counts[0] == counts[1] and not set(positive) & set(negative):
        return number(positive, {}), number(negative, {})
    numbers: dict[Any, int] = {}
    return number(positive, numbers), number(negative, numbers)


def check_alike(positive: Samples, negative: Samples) -> None:
    for name, mine, theirs in (
        ("layers", positive.layers, negative.layers),
        ("width", positive.width, negative.width),
    ):
        if mine != theirs:
            raise SpecError("negative", f"its rows have {name} {theirs}, those of positive {mine}")


def _floats(path: str, value: object, ndim: int) -> NDArray[Any]:
    form = "[rows, layers, width], or {layer: [rows, width]}" if ndim == 3 else "[rows, width]"
    if not hasattr(value, "shape"):
        try:
            value = np.asarray(value)
        except (ValueError, TypeError):
            raise SpecError(path, f"expected an array {form}, got {kind(value)}") from None
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    array = to_numpy(value)
    with at(path):
        check_unmasked(array)
    if array.ndim != ndim or not array.size or array.dtype.kind not in "fiu":
        got = f"{array.dtype} {list(array.shape)}"
        raise SpecError(path, f"expected real numbers {form}, with at least one row, got {got}")
    if not np.isfinite(array).all():
        raise SpecError(path, "has numbers that are not finite")
    return array


def read_layers(value: Any) -> list[int]:
    """Read a layer, or several, in the given order."""
    if isinstance(value, (str, bytes)):
        raise SpecError("layers", f"expected a layer, or a list of layers, got {kind(value)}")
    return [_layer("layers", layer) for layer in (value if hasattr(value, "__iter__") else [value])]


def _layer(path: str, value: object) -> int:
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        value = int(value)  # a key of JSON
    with at(path):
        return read_int(value)
