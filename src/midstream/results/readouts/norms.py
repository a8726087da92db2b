"""Norms of vectors of one completion, by site and layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from midstream import viz
from midstream.errors import SpecError
from midstream.results.arrays import array_of, from_base64, to_base64, to_numpy
from midstream.results.readouts.base import LayerRows
from midstream.sites import Tap, parse

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.plan.readouts.norms import Norms
    from midstream.plan.resolved import ResolvedCapture
    from midstream.results.activations import Activations

# Positions that a notebook shows.
_SHOWN = 256


@dataclass(frozen=True, slots=True, eq=False)
class NormRows:
    """What a `Norms` returned of one site and layer.

    Attributes:
        values: float32 [rows], the L2 norm of each vector.
        positions: int64 [rows], ascending.
    """

    values: Tensor
    positions: Tensor

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes of the JSON form's numbers, before base64."""
        return 4 * len(self)


class NormResults(LayerRows[NormRows]):
    """What the `Norms` of a request returned for one completion: `norms["resid_post", 5]` is that
    of this site and layer. Layer −1 is the model's last one.
    """

    rows_field: ClassVar[str] = "norm_rows"
    about: ClassVar[str] = "Norms of vectors, by site and layer."
    json_type: ClassVar[str] = "object"
    fewer: ClassVar[str] = "fewer positions, layers or sites"
    unknown = "there are no norms of {}; there are {}"

    def _own_key(self, key: Any) -> Tap | None:
        site, layer = key if isinstance(key, tuple) and len(key) == 2 else (None, None)
        name, number = parse(site) if isinstance(site, str) else None, self._layer_of(layer)
        return None if name is None or number is None else (name[0], number)

    def stored(self) -> Iterator[tuple[Tap, dict[str, Any], dict[str, Any]]]:
        """Yield what a sink stores of each site and layer: its tap, nothing more that describes it,
        and NumPy arrays: `values` float32 and `positions` int64, [rows].
        """
        for (site, layer), rows in self.items():
            arrays = {"values": rows.values.numpy(), "positions": rows.positions.numpy()}
            yield (f"norms.{site}", layer), {}, arrays

    def __repr__(self) -> str:
        shown = (f"{site} {layer}: {len(rows)}" for (site, layer), rows in self.items())
        return f"NormResults({', '.join(shown)})"

    def picture(self, site: str | None = None, tokens: Any = None) -> viz.Chart:
        """Return a picture of the norms of a site: a cell for each layer and position, coloured by
        the logarithm of its norm to base 10. Outlier tokens stand out as columns.

        Args:
            site: the site; None: the only one.
            tokens: texts of the tokens by position, of the prompt and the generated ones; None:
                positions alone are shown.

        Raises:
            SpecError: there are no norms of this site, or of several and none is named; its layers
                have other positions; or there are more than 20,000 cells.
        """
        return self._draw(site, tokens, None)

    def plot(self, ax: Any = None, site: str | None = None, tokens: Any = None) -> Any:
        """Draw `picture(site, tokens)` with matplotlib; `ax`, result and errors are
        `Chart.plot`'s.
        """
        return self.picture(site, tokens).plot(ax)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return self._draw(next(iter(self._rows))[0], None, _SHOWN)._repr_mimebundle_()

    def _draw(self, site: str | None, tokens: Any, most: int | None) -> viz.Chart:
        sites = list(dict.fromkeys(name for name, _ in self._rows))
        if site is None and len(sites) == 1:
            site = sites[0]
        named = None if site is None else parse(site)
        layers = sorted(layer for name, layer in self._rows if named and name == named[0])
        if named is None or not layers:
            raise SpecError("site", f"expected one of {', '.join(sites)}, got {site!r}")
        rows = [self._rows[named[0], layer] for layer in layers]
        places = rows[0].positions.tolist()
        if any(other.positions.tolist() != places for other in rows):
            raise SpecError("site", f"the layers of {named[0]} have norms at different positions")
        values = np.stack([np.asarray(to_numpy(other.values), np.float64) for other in rows])
        values, places = values[:, :most], places[:most]
        part = ", the first part" if len(rows[0]) > len(places) else ""
        with np.errstate(divide="ignore"):
            logarithms = np.log10(values)
        return viz.heatmap(
            np.where(np.isfinite(logarithms), logarithms, np.nan),
            layers,
            [str(place) if tokens is None else f"{place} {tokens[place]}" for place in places],
            title=f"norms at {named[0]}{part}",
            row_title="layer",
            column_title="position",
            value_title="log₁₀ of the L2 norm",
            center=None,
        )

    @staticmethod
    def of(activations: Activations) -> NormResults:
        """Return the norms of captured rows, in float32; heads are taken together."""
        results = {}
        for site, layer in activations.counts():
            values = to_numpy(activations[site, layer])
            norms = np.linalg.norm(values.reshape(len(values), -1).astype(np.float32), axis=1)
            positions = activations.positions_of(site, layer)
            results[site, layer] = NormRows(array_of(norms, "float32"), positions)
        return NormResults(results, activations.num_layers)

    @staticmethod
    def decode(
        rows: Activations, readouts: Sequence[tuple[ResolvedCapture, Norms]]
    ) -> NormResults | None:
        """Return what read-outs have among the rows of a completion; None: they have none."""
        import torch

        results: dict[Tap, NormRows] = {}
        for capture, _ in readouts:
            assert capture.pattern is not None
            for tap, read in zip(capture.taps, capture.pattern.reads, strict=True):
                if tap in rows.counts():
                    values = rows[tap].as_subclass(torch.Tensor)[:, 0].clone()
                    results[read] = NormRows(values, rows.positions_of(*tap).clone())
        return NormResults(results, rows.num_layers) if results else None

    def to_json(self) -> dict[str, Any]:
        """Return an object for each `site.layer`, with `positions` and, as little-endian bytes in
        base64, `values`, float32.
        """
        return {
            f"{site}.{layer}": {
                "positions": rows.positions.tolist(),
                "values": to_base64(rows.values, "<f4"),
            }
            for (site, layer), rows in self.items()
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> NormResults:
        """Read what `to_json` returned."""
        results: dict[Tap, NormRows] = {}
        for name, fields in value.items():
            site, _, layer = name.rpartition(".")
            shape = (len(fields["positions"]),)
            values = from_base64(fields["values"], shape, "<f4", "float32")
            positions = array_of(fields["positions"], "int64")
            results[site, int(layer)] = NormRows(values, positions)
        return NormResults(results)
