"""Tokens that lenses gave for the stream of one completion, by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from midstream.results.arrays import array_of, from_base64, to_base64
from midstream.results.readouts.base import NamedRows
from midstream.viz import Chart, heatmap
from midstream.viz.chart import Charted

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.plan.readouts.lens import Lens
    from midstream.plan.resolved import ResolvedCapture
    from midstream.plan.selection import Layers
    from midstream.results.activations import Activations

# Arrays of the JSON form, with the dtypes in it and here.
_FLOATS = "values", "token_values", "logsumexp"
_INTS = "ids", "ranks"


class LensCell(NamedTuple):
    """A cell: its text, the probability by which charts colour it, 0 to 1, and its token alone."""

    text: str
    probability: float = 0.0
    token: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class LensTable(Charted):
    """A table; prints as plain text, and is a chart coloured by probability in a notebook."""

    headings: Sequence[str]
    lines: Sequence[Sequence[LensCell]]
    column_title: str = ""

    def __str__(self) -> str:
        rows = [list(self.headings), *([cell.text for cell in line] for line in self.lines)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def __repr__(self) -> str:
        return str(self)

    def picture(self) -> Chart:
        """Return the tokens by layer, coloured by probability.

        Raises:
            SpecError: there are too many cells: see `viz.heatmap`.
        """
        first, *columns = self.headings
        lines = self.lines[::-1]  # layer 0 is at the bottom
        return heatmap(
            [[cell.probability or math.nan for cell in line[1:]] for line in lines],
            [line[0].text for line in lines],
            columns
            if self.column_title
            else [heading or n for n, heading in enumerate(columns, 1)],
            title="" if first == "layer" else first,
            row_title="layer",
            column_title=self.column_title or "rank of the token",
            value_title="probability",
            center=None,
            limits=(0, 1),
            fmt=".3f",
            texts=[[cell.token or cell.text for cell in line[1:]] for line in lines],
        )


@dataclass(frozen=True, slots=True, eq=False)
class LensRows(Charted):
    """What a `Lens` returned.

    Attributes:
        values: float32 [rows, layers, top], the largest logits, descending.
        ids: int64 [rows, layers, top], the token of each.
        tokens: the ids of the chosen tokens, in the given order.
        token_values: float32 [rows, layers, tokens], their logits.
        ranks: int64 [rows, layers, tokens], 1 + the number of tokens with a larger logit.
        logsumexp: float32 [rows, layers], ln Σ exp(logit) over the whole vocabulary.
        positions: int64 [rows], ascending. Row p has what would be token p + 1.
        layers: the layers, as they were listed.
    """

    values: Tensor
    ids: Tensor
    tokens: tuple[int, ...]
    token_values: Tensor
    ranks: Tensor
    logsumexp: Tensor
    positions: Tensor
    layers: tuple[int, ...]

    @property
    def logprobs(self) -> Tensor:
        """Natural logarithms of the probabilities of `ids`, float32 [rows, layers, top]."""
        return self.values - self.logsumexp[..., None]

    @property
    def token_logprobs(self) -> Tensor:
        """Natural logarithms of the probabilities of `tokens`, float32 [rows, layers, tokens]."""
        return self.token_values - self.logsumexp[..., None]

    def __len__(self) -> int:
        """Return the number of positions."""
        return len(self.positions)

    def __repr__(self) -> str:
        rows, layers, top = self.values.shape
        chosen = f" and {len(self.tokens)} tokens" if self.tokens else ""
        return f"LensRows({rows} positions × {layers} layers: top {top}{chosen})"

    def table(self, tokenizer: Any = None, row: int = -1, top: int = 5) -> LensTable:
        """Return one position as a table: a line for each layer, the last one first, with its most
        likely tokens and their probabilities, and the ranks of the chosen tokens.

        Args:
            tokenizer: what decodes ids, such as `llm.get_tokenizer()`; None: ids are shown.
            row: index of the position among `positions`.
            top: number of tokens of each layer, where as many were asked for.
        """
        show = _shown_by(tokenizer)
        top = min(top, self.ids.shape[2])
        lines = []
        for index, layer in _from_last(self.layers):
            ids = self.ids[row, index, :top].tolist()
            logprobs = self.logprobs[row, index, :top].tolist()
            ranks = self.ranks[row, index].tolist()
            lines.append(
                [
                    LensCell(str(layer)),
                    *(_token_cell(show, *pair) for pair in zip(ids, logprobs, strict=True)),
                    *(LensCell(f"#{rank}") for rank in ranks),
                ]
            )
        position = f"position {int(self.positions[row])}"
        return LensTable([position, *[""] * top, *map(show, self.tokens)], lines)

    def grid(self, tokenizer: Any = None) -> LensTable:
        """Return the most likely token of each layer, the last one first, at each position.

        Args:
            tokenizer: as for `table`.
        """
        show = _shown_by(tokenizer)
        ids, logprobs = self.ids[..., :1], self.logprobs[..., :1]
        lines = []
        for index, layer in _from_last(self.layers):
            pairs = zip(
                ids[:, index].reshape(-1).tolist(),
                logprobs[:, index].reshape(-1).tolist(),
                strict=True,
            )
            lines.append([LensCell(str(layer)), *(_token_cell(show, *pair) for pair in pairs)])
        top = self.positions.tolist() if self.ids.shape[2] else []
        return LensTable(["layer", *map(str, top)], lines, "position")

    def picture(self, tokenizer: Any = None) -> Chart:
        """Return the picture of `grid(tokenizer)`."""
        return self.grid(tokenizer).picture()

    @staticmethod
    def of(rows: Activations, capture: ResolvedCapture, asked: Lens) -> LensRows:
        """Return the rows of a lens, in memory of their own, with the layers as they are listed."""
        import torch

        assert capture.pattern is not None
        tokens, top = tuple(token for token, _ in capture.pattern.keys), asked.top
        taps = {tap[1]: tap for tap in capture.taps}
        layers = _as_listed(sorted(taps), asked.layers)
        every = torch.stack([rows[taps[layer]].as_subclass(torch.Tensor) for layer in layers], 1)
        sizes = [top, top, len(tokens), len(tokens), 1]
        ids, values, chosen, ranks, total = every.split(sizes, -1)
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

    @property
    def nbytes(self) -> int:
        """Bytes of the JSON form's numbers, before base64."""
        rows, layers, top = self.values.shape
        return 4 * rows * layers * (2 * top + 2 * len(self.tokens) + 1)

    def to_json(self) -> dict[str, Any]:
        """Return an object with `positions`, `layers`, `tokens`, `shape` of `values`, and as
        little-endian bytes in base64 `values`, `token_values` and `logsumexp`, float32, and `ids`
        and `ranks`, int32.
        """
        return {
            "positions": self.positions.tolist(),
            "layers": list(self.layers),
            "tokens": list(self.tokens),
            "shape": list(self.values.shape),
            **{name: to_base64(getattr(self, name), "<f4") for name in _FLOATS},
            **{name: to_base64(getattr(self, name), "<i4") for name in _INTS},
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LensRows:
        """Read what `to_json` returned."""
        shape, tokens = tuple(value["shape"]), tuple(value["tokens"])
        shapes = {"values": shape, "ids": shape, "logsumexp": shape[:2]}
        arrays: dict[str, Any] = {}
        for name in (*_FLOATS, *_INTS):
            sent, kept = ("<f4", "float32") if name in _FLOATS else ("<i4", "int64")
            size = shapes.get(name, (*shape[:2], len(tokens)))
            arrays[name] = from_base64(value[name], size, sent, kept)
        positions = array_of(value["positions"], "int64")
        return LensRows(**arrays, tokens=tokens, positions=positions, layers=tuple(value["layers"]))


class LensResults(NamedRows[LensRows]):
    """What lenses returned for one completion, by their names, as "logit"."""

    rows_field: ClassVar[str] = "lens_rows"
    about: ClassVar[str] = "Tokens of layers, by name of the lens."
    json_type: ClassVar[str] = "object"
    fewer: ClassVar[str] = "fewer positions, layers or tokens"
    unknown = "there is no lens {}; there is {}"
    kind = LensRows


def _from_last(layers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (index, layer) of layers, the last layer first."""
    return sorted(enumerate(layers), key=lambda pair: -pair[1])


def _as_listed(layers: list[int], asked: Layers) -> tuple[int, ...]:
    """Return ascending layers in the order in which a request lists them."""
    if asked.indices == "all":
        return tuple(layers)
    from_end = sorted(layer for layer in asked.indices if layer < 0)
    rest = [layer for layer in layers if layer not in asked.indices]
    named = dict(zip(from_end, rest, strict=True))
    return tuple(named.get(layer, layer) for layer in asked.indices)


def _token_cell(show: Callable[[int], str], token: int, logprob: float) -> LensCell:
    probability = math.exp(logprob)
    return LensCell(f"{show(token)} {100 * probability:.0f}%", probability, show(token))


def _shown_by(tokenizer: Any) -> Callable[[int], str]:
    """Return the function that shows a token: its text as Python writes it, or its id."""
    if tokenizer is None:
        return str
    return lambda token: repr(tokenizer.decode([token]))
