"""What a request captured, as its caller gets it."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstream import sites
from midstream.codecs import Codec, Raw
from midstream.rows import Rows, rows_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Tap = tuple[str, int]


class Activations:
    """The vectors captured for one completion, by (site, layer).

    `activations["resid_post", 10]` is a tensor [rows, hidden] in the model's dtype, its rows in
    the order of their positions; of rows that a codec has reduced, what `Codec.decode` gives. It is
    made when it is first asked for, and not copied where the rows lie together in memory that the
    worker shares: that memory is the worker's again when the tensor is gone. Where every site and
    layer was captured at the same positions, as with a single `Capture`, `positions` and
    `token_ids` speak for all of them; otherwise ask `positions_of`.

    Attributes:
        positions: int64 [rows], index of each row's token in its request, prompt first.
        token_ids: int64 [rows], the tokens at those positions.
        sites: the sites captured, in the order in which a layer reaches them.
        layers: the layers captured, ascending.
    """

    def __init__(
        self, values: Mapping[Tap, Tensor | Rows], positions: Mapping[Tap, Tensor], tokens: Tensor
    ) -> None:
        """Args:
        values: per (site, layer), [rows, hidden], or these rows as they came.
        positions: per (site, layer), int64 [rows], ascending.
        tokens: int64, the tokens of the whole request that were computed, from position 0.
        """
        self._rows = {
            tap: value if isinstance(value, Rows) else rows_of(value)
            for tap, value in values.items()
        }
        self._values = {tap: value for tap, value in values.items() if not isinstance(value, Rows)}
        self._positions = dict(positions)
        self._tokens = tokens
        self.sites = tuple(name for name in sites.NAMES if any(s == name for s, _ in self._rows))
        self.layers = tuple(sorted({layer for _, layer in self._rows}))

    def __getitem__(self, key: tuple[str, int]) -> Tensor:
        """[rows, hidden] of a site (or alias) and layer.

        Raises:
            KeyError: it was not captured; the message lists what was.
        """
        return self._value(self._find(key))

    @property
    def codec(self) -> Codec:
        """How the rows came from the device."""
        return next((rows.codec for rows in self._rows.values()), Raw())

    def encoded(self, site: str, layer: int) -> Tensor:
        """uint8 [rows, bytes of a row]: the rows of one site and layer as they came.

        Raises:
            KeyError: it was not captured.
        """
        return self._rows[self._find((site, layer))].encoded()

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str):
            return False
        return (sites.canonical(key[0]), key[1]) in self._rows

    def __iter__(self) -> Iterator[Tap]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def keys(self) -> tuple[Tap, ...]:
        """Every (site, layer) captured."""
        return tuple(self._rows)

    def items(self) -> tuple[tuple[Tap, Tensor], ...]:
        """Every ((site, layer), tensor)."""
        return tuple((tap, self._value(tap)) for tap in self._rows)

    @property
    def positions(self) -> Tensor:
        """int64 [rows], for all sites and layers.

        Raises:
            ValueError: they differ between sites or layers; see `positions_of`.
        """
        every = list(self._positions.values()) or [self._tokens[:0]]
        if any(len(one) != len(every[0]) or bool((one != every[0]).any()) for one in every[1:]):
            raise ValueError(
                "sites or layers were captured at different positions; "
                "use positions_of(site, layer) and token_ids_of(site, layer)"
            )
        return every[0]

    @property
    def token_ids(self) -> Tensor:
        """int64 [rows], for all sites and layers; raises as `positions` does."""
        return self._tokens[self.positions]

    def positions_of(self, site: str, layer: int) -> Tensor:
        """int64 [rows] of one site and layer; raises KeyError where it was not captured."""
        return self._positions[self._find((site, layer))]

    def token_ids_of(self, site: str, layer: int) -> Tensor:
        """int64 [rows] of one site and layer; raises KeyError where it was not captured."""
        return self._tokens[self.positions_of(site, layer)]

    def numpy(self) -> dict[Tap, NDArray[np.generic]]:
        """Per (site, layer) an array [rows, hidden]; bfloat16, which NumPy lacks, as float32."""
        import torch

        return {
            key: (value.float() if value.dtype == torch.bfloat16 else value).numpy()
            for key, value in self.items()
        }

    def save(self, path: str | Path) -> Path:
        """Writes a safetensors file: `{site}.{layer}` with its `{site}.{layer}.positions` and
        `{site}.{layer}.token_ids`, for each that was captured. Returns the path.
        """
        from safetensors.torch import save_file

        tensors = {}
        for (site, layer), value in self.items():
            tensors[f"{site}.{layer}"] = value.contiguous()
            # Shared memory is not storable: each entry gets its own copy.
            tensors[f"{site}.{layer}.positions"] = self.positions_of(site, layer).clone()
            tensors[f"{site}.{layer}.token_ids"] = self.token_ids_of(site, layer).clone()
        target = Path(path)
        save_file(tensors, target, metadata={"format": "midstream.activations", "version": "1"})
        return target

    def __repr__(self) -> str:
        if not self._rows:
            return "Activations(nothing captured)"
        first = self._value(next(iter(self._rows)))
        rows = sorted({len(each) for each in self._rows.values()})
        shown = str(rows[0]) if len(rows) == 1 else f"{rows[0]}–{rows[-1]}"
        return (
            f"Activations({', '.join(self.sites)}; layers {_short(self.layers)}; {shown} rows of "
            f"{first.shape[-1]}, {str(first.dtype).removeprefix('torch.')})"
        )

    def _repr_html_(self) -> str:
        head = "<tr><th>site</th><th>layer</th><th>rows × hidden</th><th>positions</th></tr>"
        lines = [
            f"<tr><td>{html.escape(site)}</td><td>{layer}</td>"
            f"<td>{len(rows)} × {self._value((site, layer)).shape[1]}</td>"
            f"<td>{_short(tuple(self._positions[site, layer].tolist()))}</td></tr>"
            for (site, layer), rows in self._rows.items()
        ]
        return f"<p>{html.escape(repr(self))}</p><table>{head}{''.join(lines)}</table>"

    def _value(self, tap: Tap) -> Tensor:
        if tap not in self._values:
            self._values[tap] = self._rows[tap].decoded()
        return self._values[tap]

    def _find(self, key: Any) -> Tap:
        if key not in self:
            raise KeyError(f"{key!r} was not captured; there is {repr(self)[12:-1]}")
        name = sites.canonical(key[0])
        assert name is not None
        return name, key[1]


def _short(numbers: tuple[int, ...]) -> str:
    """Ascending numbers with runs written as `first–last`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)
