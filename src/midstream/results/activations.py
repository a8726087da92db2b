"""Captured vectors of one completion, by site and layer."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream import sites
from midstream.console import format_ranges
from midstream.errors import SpecError
from midstream.results.arrays import (
    Heads,
    encode_blocks,
    save_tensors,
    show_size,
    stack_layers,
    tap_of_key,
    to_numpy,
)
from midstream.results.encoded_rows import Rows
from midstream.results.held_rows import HeldRows
from midstream.results.left_rows import LeftRows
from midstream.results.media_span import MediaSpan
from midstream.results.norm_chart import NormPlots
from midstream.results.rows_file import (
    POSITIONS,
    TOKENS,
    header_of,
    heads_of,
    read_rows_file,
    widths_of,
)
from midstream.sites import Tap
from midstream.validation import (
    check_regular,
    check_suffix,
    hint,
    suggests,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from midstream.codecs import Codec


# Names of a tensor, and of tables.
_TENSOR = 'take a tensor, as activations["resid_post", 10]; its rows are on the host'
_INSTEAD = {
    **dict.fromkeys(("to", "cpu", "cuda", "float", "half", "detach", "tolist"), _TENSOR),
    **dict.fromkeys(("shape", "ndim", "dtype", "size", "mean", "sum", "norm", "T"), _TENSOR),
    "to_pandas": "capture into a store, whose `to_arrow().read_pandas()` is a table of rows",
    "tokens": "write activations.token_ids",
    "stack": "write midstream.stack(outputs)",
}


@suggests(_INSTEAD)
class Activations(NormPlots, LeftRows):
    """The vectors captured for one completion, by (site, layer).

    `activations["resid_post", 10]` is a tensor [rows, hidden] in the model's dtype, by position,
    created on first access. It is a view without a copy if the rows are contiguous in the worker's
    shared memory, which is freed with it. `torch.save`, pickles, deep copies and queues of
    processes take a tensor's own bytes alone. A client without torch has arrays of NumPy, with
    bfloat16 widened to float32.

    The sites `embed` and `final_norm` have no layer; in keys they have the first and the last one.

    At the sites q, k, v, rot_q, rot_k and z it is [rows, heads, head_dim]: one vector per query
    head, at k, v and rot_k per key-value head. A `Capture` with `heads` has these heads only.

    `positions` and `token_ids` describe all sites and layers if these were captured at the same
    positions, as with a single `Capture`; otherwise use `positions_of` and `token_ids_of`.

    Attributes:
        positions: int64 [rows], index of each row's token in its request, prompt first.
        token_ids: int64 [rows], the tokens at those positions.
        num_layers: layers of the model; None: unknown.
        heads: the heads of each (site, layer) that is [rows, heads, head_dim].
        held: the encoded rows, from which vectors are decoded.
        positions_of_media: where each image, audio and video of the prompt is; see `MediaSpan`.
        source: what keeps rows of `Capture(reduce="device")` on the device; None: there are none.
    """

    def __init__(
        self,
        values: Mapping[Tap, Tensor | Rows],
        positions: Mapping[Tap, Tensor],
        tokens: Tensor | Sequence[int],
        num_layers: int | None = None,
        heads: Mapping[Tap, Heads] | None = None,
        positions_of_media: tuple[MediaSpan, ...] = (),
    ) -> None:
        """Create from tensors or encoded rows, which are not copied and are read on first access.

        Args:
            values: per (site, layer), [rows, width], or the encoded rows; of all heads.
            positions: per (site, layer), int64 [rows], ascending.
            tokens: tokens of the whole request that were computed, from position 0.
            num_layers: layers of the model, for negative layers; None: unknown.
            heads: per (site, layer), the heads that are shown.
        """
        self.held = HeldRows(values, positions, tokens)
        self._values: dict[Tap, Tensor] = {}
        self.num_layers = num_layers
        self.positions_of_media = positions_of_media
        self.heads = {tap: tap_heads for tap, tap_heads in (heads or {}).items() if tap in values}

    def __getitem__(self, key: tuple[str, int] | str | int) -> Tensor:
        """Return captured vectors, in the model's dtype.

        Args:
            key: (site, layer), a name with both (`blocks.10.hook_resid_post`,
                `model.layers.10.output`, `resid_post.10`), or a layer if one site was captured:
                [rows, width], or [rows, heads, head_dim]. A site alone: its layers stacked along a
                new first dimension, ascending; of a site without layers, its rows. Layer −1 is the
                model's last one. Sites have all names of `midstream.sites.parse`.
        """
        try:
            return self._values[key]  # type: ignore[index]
        except (KeyError, TypeError):
            pass  # not read yet, another form of a key, or no key
        if isinstance(key, str):
            named = sites.parse(key)
            if named is not None and named[1] is None and named[0] not in sites.ENDS:
                return stack_layers(self, named[0])
        return self._value(_find(self, key))

    @property
    def codec(self) -> Codec:
        """The codec that encoded the rows on the device."""
        return self.held.codec

    def encoded(self, site: str, layer: int) -> Tensor:
        """Return the encoded rows of a site and layer, uint8 [rows, bytes of a row]; all heads."""
        from midstream.results.interleaved_rows import interleaved

        return interleaved(self.held.rows(_find(self, (site, layer))).encoded())

    def copy(self) -> Activations:
        """Return the rows in memory of their own, so that the worker's memory can be freed."""
        held = self.held.copy()
        more = (held.token_ids, self.num_layers, self.heads, self.positions_of_media)
        copied = Activations(held.values, held.positions, *more)
        copied.source = self.source
        return copied

    def __contains__(self, key: object) -> bool:
        named = sites.parse(key) if isinstance(key, str) else None
        if named is not None and named[1] is None:
            return named[0] in self.sites
        return tap_of_key(self.held.values, key, self.num_layers) in self.held.values

    def __iter__(self) -> Iterator[Tap]:
        return iter(self.held.values)

    def __len__(self) -> int:
        return len(self.held.values)

    def keys(self) -> tuple[Tap, ...]:
        """Return every captured (site, layer)."""
        return tuple(self.held.values)

    def items(self) -> tuple[tuple[Tap, Tensor], ...]:
        """Return every ((site, layer), tensor)."""
        return tuple((tap, self._value(tap)) for tap in self.held.values)

    @property
    def sites(self) -> tuple[str, ...]:
        """The captured sites, in the order in which a layer reaches them."""
        captured = {site for site, _ in self.held.values}
        return tuple(name for name in sites.NAMES if name in captured)

    @property
    def layers(self) -> tuple[int, ...]:
        """The captured layers, ascending, of the sites that have layers."""
        return tuple(sorted({layer for site, layer in self.held.values if site not in sites.ENDS}))

    @property
    def positions(self) -> Tensor:
        """Positions that all sites and layers share, int64 [rows].

        Raises:
            ValueError: they differ between sites or layers; use `positions_of`.
        """
        every = list(self.held.positions.values()) or [self.held.token_ids[:0]]
        # In most cases all of them share one tensor.
        others = {id(other): other for other in every[1:] if other is not every[0]}.values()
        if any(len(other) != len(every[0]) or bool((other != every[0]).any()) for other in others):
            raise ValueError(
                "sites or layers were captured at different positions; "
                "use positions_of(site, layer) and token_ids_of(site, layer)"
            )
        return every[0]

    @property
    def token_ids(self) -> Tensor:
        """Token ids that all sites and layers share, int64 [rows].

        Raises:
            ValueError: the positions differ between sites or layers; use `token_ids_of`.
        """
        return self.held.token_ids[self.positions]

    def positions_of(self, site: str, layer: int | None = None) -> Tensor:
        """Return the positions of one site and layer, int64 [rows]; no layer where a site has none.

        Raises:
            KeyError: the site and layer were not captured.
        """
        return self.held.positions[_find(self, site if layer is None else (site, layer))]

    def token_ids_of(self, site: str, layer: int | None = None) -> Tensor:
        """Return the token ids of one site and layer, int64 [rows]; see `positions_of`."""
        return self.held.token_ids[self.positions_of(site, layer)]

    def counts(self) -> dict[Tap, int]:
        """Return the number of rows by (site, layer)."""
        return self.held.counts()

    def to_transformer_lens(self) -> dict[str, Tensor]:
        """Return the vectors by TransformerLens's names, as its cache has them: [1, rows, hidden],
        or [1, rows, heads, head_dim].

        `blocks.10.hook_resid_post` is `resid_post` of layer 10; rows are those that were captured.
        """
        return {sites.transformer_lens_name(tap): value[None] for tap, value in self.items()}

    def numpy(self) -> dict[Tap, NDArray[np.generic]]:
        """Return an array by (site, layer); bfloat16, which NumPy lacks, becomes float32."""
        return {key: to_numpy(value) for key, value in self.items()}

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return the array of the only site and layer; SpecError: there are several."""
        return _only_array(self, dtype, copy)

    def save(self, path: str | Path, codec: str | None = None) -> Path:
        """Write a safetensors file, and return its path.

        It has the tensors `{site}.{layer}`, `{site}.{layer}.positions` and
        `{site}.{layer}.token_ids` for each captured site and layer. Rows are [rows, width], of all
        heads; the metadata name the heads.

        Args:
            path: the file, whose name ends in `.safetensors`.
            codec: "full8:per=dim": rows are written as uint8 [hidden, 8 + rows], with a scale per
                dimension over the rows of their site and layer; see `midstream.codecs.Full8PerDim`.
                None: decoded rows are written as they are.

        Raises:
            SpecError: another codec or suffix. UnsupportedError: a codec without torch.
        """
        check_suffix(path, ".safetensors", instead="; for NumPy: numpy.savez(path, rows=x[tap])")
        rows, indices = dict[str, Any](), dict[str, Any]()
        for (site, layer), value in with_heads(self, {}).items():
            rows[f"{site}.{layer}"] = value
            indices[f"{site}.{layer}.{POSITIONS}"] = self.positions_of(site, layer)
            indices[f"{site}.{layer}.{TOKENS}"] = self.token_ids_of(site, layer)
        metadata = header_of(self.num_layers, self.positions_of_media)
        if codec is not None:
            rows, encoding = encode_blocks(rows, codec)
            widths = {name: len(block) for name, block in rows.items()}
            metadata |= encoding | widths_of(widths, int(encoding.get("hidden", 0)))
        save_tensors(rows, indices, Path(path), metadata | heads_of(self.heads))
        return Path(path)

    @staticmethod
    def load(path: str | Path) -> Activations:
        """Read a file that `save` wrote.

        Raises:
            SpecError: it is not such a file.
            OSError: it cannot be read.
        """
        check_regular(path)
        return Activations(*read_rows_file(Path(path).read_bytes()))

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickles and copies have: these rows, encoded, and no other memory."""
        return {**self.__dict__, "held": self.held.alone(), "_values": {}, "source": None}

    def __repr__(self) -> str:
        if not self.keys():
            return "Activations(nothing captured)"
        first = self[self.keys()[0]]
        rows = sorted(set(self.counts().values()))
        shown = str(rows[0]) if len(rows) == 1 else f"{rows[0]}–{rows[-1]}"
        layers = f"layers {format_ranges(self.layers)}; " if self.layers else ""
        return (
            f"Activations({', '.join(self.sites)}; {layers}"
            f"{shown} rows of {' or '.join(_sizes(self))}, "
            f"{str(first.dtype).removeprefix('torch.')})"
        )

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(repr(self))}</p>{_html_table(self)}"

    def _value(self, tap: Tap) -> Tensor:
        if tap not in self._values:
            self._values.update(self.held.decoded(tap, self.heads))
        return self._values[tap]


def _html_table(rows: Activations) -> str:
    head = "<tr><th>site</th><th>layer</th><th>rows × size</th><th>positions</th></tr>"
    lines = [
        f"<tr><td>{html.escape(site)}</td><td>{'' if site in sites.ENDS else layer}</td>"
        f"<td>{show_size((count, *rows[site, layer].shape[1:]))}</td>"
        f"<td>{format_ranges(tuple(rows.positions_of(site, layer).tolist()))}</td></tr>"
        for (site, layer), count in rows.counts().items()
    ]
    return f"<table>{head}{''.join(lines)}</table>"


def _only_array(rows: Activations, dtype: Any, copy: bool | None) -> NDArray[Any]:
    if len(rows) != 1:
        raise SpecError(
            "",
            f"{len(rows)} sites and layers are no array; take one, as "
            'activations["resid_post", 3], a site of all layers, as activations["resid_post"], '
            "or activations.numpy() for a dict of arrays",
        )
    return np.array(to_numpy(rows[rows.keys()[0]]), dtype, copy=copy or None)


def with_heads(
    activations: Activations,
    heads: Mapping[Tap, Heads],
    positions_of_media: tuple[MediaSpan, ...] | None = None,
) -> Activations:
    """Return the same rows with other heads shown, by (site, layer): without any, [rows, width];
    and with other media of the prompt, None: the same.
    """
    if positions_of_media is None:
        positions_of_media = activations.positions_of_media
    if activations.heads == heads and activations.positions_of_media == positions_of_media:
        return activations
    shown = Activations(
        activations.held.values,
        activations.held.positions,
        activations.held.tokens,
        activations.num_layers,
        heads,
        positions_of_media,
    )
    shown.source = activations.source
    return shown


def rows_after(
    activations: Activations, last: Mapping[Tap, int], taps: Iterable[Tap]
) -> Activations:
    """Return the rows of some taps that come after a position of each; all where it has none."""
    values, positions = {}, {}
    for tap in taps:
        rows, every = activations.held.rows(tap), activations.held.positions[tap]
        later = (every > last.get(tap, -1)).nonzero()[:, 0]
        chosen = later if rows.chosen is None else rows.chosen[later]
        values[tap], positions[tap] = replace(rows, chosen=chosen), every[later]
    shown = (activations.num_layers, activations.heads, activations.positions_of_media)
    return Activations(values, positions, activations.held.tokens, *shown)


def _find(rows: Activations, key: Any) -> Tap:
    """Return the captured tap that a key means."""
    values = rows.held.values
    try:
        is_tap = key in values
    except TypeError:  # unhashable, such as a slice
        is_tap = False
    if is_tap:
        return key  # type: ignore[no-any-return]
    tap = tap_of_key(values, key, rows.num_layers)
    if tap is None or tap not in values:
        raise KeyError(_explain(rows, key, tap))
    return tap


def _explain(rows: Activations, key: Any, tap: Tap | None) -> str:
    """Return the message for a key that is not there, or means no tap."""
    problem = f"{key!r} was not captured; there is {repr(rows)[12:-1]}"
    if tap is not None:
        if tap[1] < 0:
            problem += "; the number of layers is unknown here: count the layer from 0"
        return problem
    site = key[0] if isinstance(key, tuple) and key else key
    if isinstance(site, str) and sites.parse(site) is None:
        return f"{problem}; {site!r} is no site{hint(site, sites.NAMES)}"
    if isinstance(site, str) and sites.canonical(site) in sites.ENDS:
        return f"{problem}; {site} has no layer, its name alone is its key"
    return f'{problem}; a key is (site, layer), as ["resid_post", 3]; a site alone has all layers'


def _sizes(acts: Activations) -> list[str]:
    """Return the distinct sizes of the vectors, ascending; of each only one tap is decoded."""
    taps = {}
    for tap, values in acts.held.values.items():
        width = values.hidden if isinstance(values, Rows) else values.shape[1]
        taps[width, acts.heads.get(tap)] = tap
    shapes = sorted({tuple(acts[tap].shape[1:]) for tap in taps.values()})
    return [show_size(shape) for shape in shapes]
