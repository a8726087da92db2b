"""Norms of vectors of one completion, by site and layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from midstream.results.arrays import array_of, from_base64, tap_of_key, to_base64
from midstream.results.norm_chart import norm_chart
from midstream.results.readouts.base import LayerRows
from midstream.sites import Tap
from midstream.viz.chart import Chart, Charted

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.plan.readouts.norms import Norms
    from midstream.plan.resolved import ResolvedCapture
    from midstream.results.activations import Activations


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


class NormResults(LayerRows[NormRows], Charted):
    """What the `Norms` of a request returned for one completion: `norms["resid_post", 5]` is that
    of this site and layer, as is `norms["resid_post.5"]`, and `norms[5]` if there is one site.
    Layer −1 is the model's last one.
    """

    rows_field: ClassVar[str] = "norm_rows"
    about: ClassVar[str] = "Norms of vectors, by site and layer."
    json_type: ClassVar[str] = "object"
    fewer: ClassVar[str] = "fewer positions, layers or sites"
    unknown = "there are no norms of {}; there are {}"

    def _own_key(self, key: Any) -> Tap | None:
        return tap_of_key(self._rows, key, self._num_layers)

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

    def picture(self, site: str | None = None, tokens: Any = None) -> Chart:
        """Return a picture of the norms of a site: a cell for each layer and position, coloured by
        the logarithm of its norm to base 10. Outlier tokens stand out as columns.

        Args:
            site: the site; None: the only one.
            tokens: texts of the tokens by position, of the prompt and the generated ones; None:
                positions alone are shown.

        Raises:
            SpecError: there are no norms of this site, or of several and none is named; its layers
                have other positions; or there are too many cells: see `viz.heatmap`.
        """

        def read(tap: Tap) -> tuple[Any, Any]:
            return self._rows[tap].values, self._rows[tap].positions

        return norm_chart(tuple(self._rows), read, site, tokens)

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
