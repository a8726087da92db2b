"""What a request captured, as its caller gets it."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midstream import sites
from midstream.codecs import Codec, Raw
from midstream.results.encoded_rows import Rows, rows_of

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
    """

    def __init__(
        self,
        values: Mapping[Tap, Tensor | Rows],
        positions: Mapping[Tap, Tensor],
        tokens: Tensor | Sequence[int],
    ) -> None:
        """Args:
        values: per (site, layer), [rows, hidden], or these rows as they came. Not copied, and
            looked at when they are asked for.
        positions: per (site, layer), int64 [rows], ascending.
        tokens: the tokens of the whole request that were computed, from position 0.
        """
        self._given = values
        self._values: dict[Tap, Tensor] = {}
        self._positions = positions
        self._given_tokens = tokens

    def __getitem__(self, key: tuple[str, int]) -> Tensor:
        """[rows, hidden] of a site (or alias) and layer.

        Raises:
            KeyError: it was not captured; the message lists what was.
        """
        return self._value(self._find(key))

    @property
    def codec(self) -> Codec:
        """How the rows came from the device."""
        return next((self._rows(tap).codec for tap in self._given), Raw())

    def encoded(self, site: str, layer: int) -> Tensor:
        """uint8 [rows, bytes of a row]: the rows of one site and layer as they came.

        Raises:
            KeyError: it was not captured.
        """
        return self._rows(self._find((site, layer))).encoded()

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, tuple) or len(key) != 2 or not isinstance(key[0], str):
            return False
        return (sites.canonical(key[0]), key[1]) in self._given

    def __iter__(self) -> Iterator[Tap]:
        return iter(self._given)

    def __len__(self) -> int:
        return len(self._given)

    def keys(self) -> tuple[Tap, ...]:
        """Every (site, layer) captured."""
        return tuple(self._given)

    def items(self) -> tuple[tuple[Tap, Tensor], ...]:
        """Every ((site, layer), tensor)."""
        return tuple((tap, self._value(tap)) for tap in self._given)

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites captured, in the order in which a layer reaches them."""
        found = {site for site, _ in self._given}
        return tuple(name for name in sites.NAMES if name in found)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers captured, ascending."""
        return tuple(sorted({layer for _, layer in self._given}))

    @property
    def positions(self) -> Tensor:
        """int64 [rows], for all sites and layers.

        Raises:
            ValueError: they differ between sites or layers; see `positions_of`.
        """
        every = list(self._positions.values()) or [self._tokens[:0]]
        # Mostly they share one tensor.
        others = {id(one): one for one in every[1:] if one is not every[0]}.values()
        if any(len(one) != len(every[0]) or bool((one != every[0]).any()) for one in others):
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

    def counts(self) -> dict[Tap, int]:
        """How many rows each site and layer has."""
        sizes: dict[int, int] = {}  # of the tensors that many of them share
        found = {}
        for tap, positions in self._positions.items():
            key = id(positions)
            if key not in sizes:
                sizes[key] = positions.shape[0]
            found[tap] = sizes[key]
        return found

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
        if not self._given:
            return "Activations(nothing captured)"
        first = self._value(next(iter(self._given)))
        rows = sorted(set(self.counts().values()))
        shown = str(rows[0]) if len(rows) == 1 else f"{rows[0]}–{rows[-1]}"
        return (
            f"Activations({', '.join(self.sites)}; layers {_short(self.layers)}; {shown} rows of "
            f"{first.shape[-1]}, {str(first.dtype).removeprefix('torch.')})"
        )

    def _repr_html_(self) -> str:
        head = "<tr><th>site</th><th>layer</th><th>rows × hidden</th><th>positions</th></tr>"
        lines = [
            f"<tr><td>{html.escape(site)}</td><td>{layer}</td>"
            f"<td>{rows} × {self._value((site, layer)).shape[1]}</td>"
            f"<td>{_short(tuple(self._positions[site, layer].tolist()))}</td></tr>"
            for (site, layer), rows in self.counts().items()
        ]
        return f"<p>{html.escape(repr(self))}</p><table>{head}{''.join(lines)}</table>"

    @property
    def _tokens(self) -> Tensor:
        import torch

        if not isinstance(self._given_tokens, torch.Tensor):
            self._given_tokens = torch.tensor(self._given_tokens, dtype=torch.int64)
        return self._given_tokens

    def _rows(self, tap: Tap) -> Rows:
        given = self._given[tap]
        return given if isinstance(given, Rows) else rows_of(given)

    def _value(self, tap: Tap) -> Tensor:
        if tap not in self._values:
            given = self._given[tap]
            self._values[tap] = given.decoded() if isinstance(given, Rows) else given
        return self._values[tap]

    def _find(self, key: Any) -> Tap:
        if isinstance(key, tuple) and key in self._given:
            return key
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
