"""Attention weights as JSON values, for servers and clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from midstream.results.arrays import array_of, from_base64, to_base64
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
    objects = []
    for (name, layer), rows in results.items():
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
