"""Attention weights as JSON values, for servers and clients."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from midstream.results.arrays import array_of, to_numpy
from midstream.results.attention import AttentionResults, AttentionRows, Key


def nbytes_of(results: AttentionResults) -> int:
    """Return the bytes of all values and keys, before base64."""
    sizes = [rows.values.numel() * 4 for rows in results.values()]
    sizes += [rows.keys.numel() * 4 for rows in results.values() if rows.keys is not None]
    return sum(sizes)


def to_json(results: AttentionResults) -> list[dict[str, Any]]:
    """Return an object for each (name, layer).

    Its fields are `name`, `layer`, `reduce`, `positions` and `heads`, and as little-endian bytes in
    base64 `values`, float32 of the shape `shape`, and `keys` of `top_keys`, int32 of that shape.
    """
    found = []
    for (name, layer), rows in results.items():
        one = {
            "name": name,
            "layer": layer,
            "reduce": rows.reduce,
            "positions": rows.positions.tolist(),
            "heads": list(rows.heads),
            "shape": list(rows.values.shape),
            "values": _text(to_numpy(rows.values).astype("<f4")),
        }
        if rows.keys is not None:
            one["keys"] = _text(to_numpy(rows.keys).astype("<i4"))
        found.append(one)
    return found


def from_json(
    values: Sequence[Mapping[str, Any]], num_layers: int | None = None
) -> AttentionResults:
    """Read what `to_json` returned."""
    found: dict[Key, AttentionRows] = {}
    for one in values:
        shape = tuple(one["shape"])
        keys = None
        if "keys" in one:
            keys = array_of(_array(one["keys"], "<i4", shape).astype(np.int64), "int64")
        found[one["name"], one["layer"]] = AttentionRows(
            one["reduce"],
            array_of(_array(one["values"], "<f4", shape).astype(np.float32), "float32"),
            keys,
            array_of(one["positions"], "int64"),
            tuple(one["heads"]),
        )
    return AttentionResults(found, num_layers)


def _text(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(values.tobytes()).decode()


def _array(text: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), dtype).reshape(shape)
