"""Attention weights of one completion's queries, by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from midstream import viz
from midstream.errors import SpecError
from midstream.results.arrays import array_of, from_base64, to_base64, to_numpy
from midstream.results.readouts.base import LayerRows
from midstream.viz.chart import Charted
from midstream.viz.heatmaps import position_label

if TYPE_CHECKING:
    from torch import Tensor

    from midstream.plan.readouts.attention import Attention
    from midstream.plan.resolved import Pattern, ResolvedCapture
    from midstream.results.activations import Activations
    from midstream.sites import Tap

Key = tuple[str, int]  # (name of the `Attention`, layer from 0)
_WORDS = {"top": "top_keys"}
# What the values are, for colour bars.
_VALUES = {
    "top_keys": "attention weight (share)",
    "mass": "attention mass (share)",
    "entropy": "entropy (nats)",
    "full": "attention weight (share)",
    "scores": "score before the softmax (logits)",
}


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRows(Charted):
    """What an `Attention` returned of one layer.

    Attributes:
        reduce: `"top_keys"`, `"mass"`, `"entropy"`, `"full"` or `"scores"`.
        values: float32. Of `top_keys` [queries, heads, k], the weights, descending; of `mass` and
            `entropy` [queries, heads]; of `full` [queries, heads, keys], the weight of each key
            from position 0 to the last query's, 0 for keys that a query does not see; of `scores`
            likewise the scores before the softmax, −∞ for these keys.
        keys: of `top_keys`, int64 [queries, heads, k], the positions of the keys, −1 where there
            are fewer keys with a weight; else None.
        positions: int64 [queries], the positions of the queries, ascending.
        heads: the query heads, as they were listed.
    """

    reduce: str
    values: Tensor
    keys: Tensor | None
    positions: Tensor
    heads: tuple[int, ...]

    def __len__(self) -> int:
        """Return the number of queries."""
        return len(self.positions)

    @property
    def nbytes(self) -> int:
        """Bytes of the JSON form's numbers, before base64."""
        return 4 * (self.values.numel() + (0 if self.keys is None else self.keys.numel()))

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.values.shape))
        return f"AttentionRows({self.reduce}: {shape})"

    def picture(self, tokens: Any = None, head: int | None = None) -> viz.Chart:
        """Return a picture of the weights.

        `full` and `scores` are a cell for each query and key, `mass` and `entropy` one for each
        query and head, and `top_keys` a line for each query and head, with the keys.

        Args:
            tokens: texts of the tokens by position, of the prompt and the generated ones; None:
                positions alone are shown.
            head: one of `heads`; None: the mean over the heads of `full` and `scores`, and all
                heads of the others.

        Raises:
            SpecError: there is no such head, or there are too many cells: see `viz.heatmap`.
        """
        if head is not None and head not in self.heads:
            raise SpecError("head", f"expected one of {list(self.heads)}, got {head!r}")

        at = slice(None) if head is None else [self.heads.index(head)]
        values = np.asarray(to_numpy(self.values)[:, at], np.float64)
        rows = [position_label(place, tokens) for place in self.positions.tolist()]
        heads = list(self.heads) if head is None else [head]
        columns: Any = heads
        texts, column_title, title = None, "head", f"{self.reduce} of attention"
        if self.keys is not None:
            count = values.shape[2]
            keys: Any = to_numpy(self.keys)[:, at].reshape(-1, count)
            values = np.where(keys < 0, np.nan, values.reshape(-1, count))
            rows = [f"{query}, head {number}" for query in rows for number in heads]
            texts = [
                ["" if key < 0 else position_label(key, tokens) for key in line]
                for line in keys.tolist()
            ]
            columns, column_title = range(1, count + 1), "key, by weight"
            title = "keys with most attention"
        elif self.reduce in ("full", "scores"):
            mean = values.mean(1)
            values = np.where(np.isfinite(mean), mean, np.nan)
            columns, column_title = (
                [position_label(key, tokens) for key in range(mean.shape[1])],
                "key",
            )
            of = f"head {heads[0]}" if len(heads) == 1 else f"mean of {len(heads)} heads"
            title = f"{'attention' if self.reduce == 'full' else 'scores'}, {of}"
        return viz.heatmap(
            values,
            rows,
            columns,
            title=title,
            row_title="query",
            column_title=column_title,
            value_title=_VALUES[self.reduce],
            center=None,
            limits=None if self.reduce in ("entropy", "scores") else (0, 1),
            texts=texts,
        )


class AttentionResults(LayerRows[AttentionRows]):
    """What the `Attention`s of a request returned for one completion.

    `attention[5]` is that of layer 5, and `attention["name", 5]` that of the `Attention` with this
    name. Layer −1 is the model's last one. Keys are (name, layer), with an empty name where none
    was given.
    """

    rows_field: ClassVar[str] = "attention_rows"
    about: ClassVar[str] = "Attention weights, by layer."
    json_type: ClassVar[str] = "array"
    fewer: ClassVar[str] = "fewer queries, layers or heads, or a smaller reduction"
    unknown = "there is no attention of {}; there is {}"

    def _own_key(self, key: Any) -> tuple[Any, int | None]:
        name, layer = key if isinstance(key, tuple) and len(key) == 2 else ("", key)
        return name, self._layer_of(layer)

    def _short_key(self, key: Any) -> Any:
        return key if key[0] else key[1]

    def stored(self) -> Iterator[tuple[Tap, dict[str, Any], dict[str, Any]]]:
        """Yield what a sink stores of each layer: its tap, its `reduce`, and NumPy arrays: `values`
        and, of `top_keys`, `keys` as in `AttentionRows`, `positions` and `heads`, int64.
        """
        for (name, layer), rows in self.items():
            arrays: dict[str, Any] = {"values": rows.values.numpy()}
            if rows.keys is not None:
                arrays["keys"] = rows.keys.numpy()
            arrays["positions"] = rows.positions.numpy()
            arrays["heads"] = np.asarray(rows.heads, np.int64)
            site = f"attention.{name}" if name else "attention"
            yield (site, layer), {"reduce": rows.reduce}, arrays

    @staticmethod
    def decode(
        rows: Activations, readouts: Sequence[tuple[ResolvedCapture, Attention]]
    ) -> AttentionResults | None:
        """Return what read-outs have among the rows of a completion; None: they have none."""
        results: dict[Key, AttentionRows] = {}
        for capture, asked in readouts:
            assert capture.pattern is not None
            for place, tap in enumerate(capture.taps):
                if tap in rows.counts():
                    count = capture.pattern.counts[place]
                    results[asked.name, tap[1]] = _rows_of(
                        rows, tap, capture.pattern, count, asked.heads
                    )
        return AttentionResults(results, rows.num_layers) if results else None

    def to_json(self) -> list[dict[str, Any]]:
        """Return an object for each (name, layer).

        Its fields are `name`, `layer`, `reduce`, `positions` and `heads`, and as little-endian
        bytes in base64 `values`, float32 of the shape `shape`, and `keys` of `top_keys`, int32 of
        that shape.
        """
        objects = []
        for (name, layer), rows in self.items():
            fields = {
                "name": name,
                "layer": layer,
                "reduce": rows.reduce,
                "positions": rows.positions.tolist(),
                "heads": list(rows.heads),
                "shape": list(rows.values.shape),
                "values": to_base64(rows.values, "<f4"),
            }
            if rows.keys is not None:
                fields["keys"] = to_base64(rows.keys, "<i4")
            objects.append(fields)
        return objects

    @staticmethod
    def from_json(values: Sequence[Mapping[str, Any]]) -> AttentionResults:
        """Read what `to_json` returned."""
        rows: dict[Key, AttentionRows] = {}
        for fields in values:
            shape = tuple(fields["shape"])
            keys = from_base64(fields["keys"], shape, "<i4", "int64") if "keys" in fields else None
            rows[fields["name"], fields["layer"]] = AttentionRows(
                fields["reduce"],
                from_base64(fields["values"], shape, "<f4", "float32"),
                keys,
                array_of(fields["positions"], "int64"),
                tuple(fields["heads"]),
            )
        return AttentionResults(rows)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers, ascending."""
        return tuple(sorted({layer for _, layer in self._rows}))

    def __repr__(self) -> str:
        parts = (
            f"{f'{name}, ' if name else ''}layer {layer}: {rows!r}"
            for (name, layer), rows in self._rows.items()
        )
        return f"AttentionResults({'; '.join(parts)})"


def _rows_of(
    rows: Activations, tap: Tap, pattern: Pattern, count: int, asked: tuple[int, ...] | None
) -> AttentionRows:
    """Return the rows of one layer, of `count` heads, in memory of their own."""
    import torch

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
