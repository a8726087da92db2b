"""Pictures of attention weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from midstream import viz
from midstream.errors import SpecError
from midstream.results.arrays import to_numpy

if TYPE_CHECKING:
    from midstream.results.attention import AttentionRows


def draw(
    rows: AttentionRows, tokens: Any, head: int | None, most: int | None = None
) -> viz.Picture:
    """Return the picture of some rows; see `AttentionRows.picture`.

    Args:
        rows: the rows.
        tokens: texts of the tokens by position; None: unknown.
        head: one of the rows' heads; None: all.
        most: number of queries, and of keys or lines, that are shown; None: all.

    Raises:
        SpecError: there is no such head, or there are more cells than a picture may have.
    """
    if head is not None and head not in rows.heads:
        raise SpecError("head", f"expected one of {list(rows.heads)}, got {head!r}")

    def name(position: int) -> str:
        return str(position) if tokens is None else f"{position} {tokens[position]}"

    at = slice(None) if head is None else [rows.heads.index(head)]
    values = np.asarray(to_numpy(rows.values)[:most, at], np.float64)
    queries = [name(place) for place in rows.positions[:most].tolist()]
    heads = list(rows.heads) if head is None else [head]
    is_cut = most is not None and len(rows) > most
    if rows.keys is not None:
        keys = to_numpy(rows.keys)[:most, at]
        return _top_keys(values, keys, (queries, heads), name, most)
    if rows.reduce in ("mass", "entropy"):
        is_mass = rows.reduce == "mass"
        return viz.heatmap(
            values,
            queries,
            heads,
            title=f"{rows.reduce} of attention{_part(is_cut)}",
            row_title="query",
            column_title="head",
            unit="" if is_mass else "nats",
            center=None,
            limits=(0, 1) if is_mass else None,
        )
    mean = values.mean(1)[:, :most]
    is_full = rows.reduce == "full"
    of = f"head {heads[0]}" if len(heads) == 1 else f"mean of {len(heads)} heads"
    is_cut = is_cut or mean.shape[1] < values.shape[2]
    return viz.heatmap(
        np.where(np.isfinite(mean), mean, np.nan),
        queries,
        [name(key) for key in range(mean.shape[1])],
        title=f"{'attention' if is_full else 'scores'}, {of}{_part(is_cut)}",
        row_title="query",
        column_title="key",
        center=None,
        limits=(0, 1) if is_full else None,
    )


def _top_keys(
    values: Any,
    keys: Any,
    names: tuple[list[str], list[int]],
    name: Callable[[int], str],
    most: int | None,
) -> viz.Picture:
    """Draw a line for each query and head: its keys, coloured by weight.

    Args:
        values: float64 [queries, heads, k].
        keys: int64 [queries, heads, k], −1 for none.
        names: those of the queries, and the heads.
        name: the function that names a key by its position.
        most: number of lines; None: all.
    """
    lines = [f"{query}, head {head}" for query in names[0] for head in names[1]]
    count = keys.shape[2]
    texts = [
        ["" if key < 0 else name(key) for key in line]
        for line in keys.reshape(len(lines), count)[:most].tolist()
    ]
    weights = values.reshape(len(lines), count)[:most]
    return viz.heatmap(
        np.where(keys.reshape(len(lines), count)[:most] < 0, np.nan, weights),
        lines[:most],
        range(1, count + 1),
        title=f"keys with most attention{_part(len(texts) < len(lines))}",
        row_title="query",
        column_title="key",
        center=None,
        limits=(0, 1),
        texts=texts,
    )


def _part(is_cut: bool) -> str:
    return ", the first part" if is_cut else ""
