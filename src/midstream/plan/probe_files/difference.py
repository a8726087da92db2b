"""`ProbeDiff`: what differs between two probes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from midstream.plan.probe_files.archive import split
from midstream.validation import show


@dataclass(frozen=True, slots=True)
class ProbeDiff:
    """What differs between two probes.

    Attributes:
        fields: (of the first, of the second) by dotted name, such as "bias" or
            "info.threshold"; None where one has no such field. Vectors are in `cosines`.
        cosines: of the vectors of the same name and shape, such as "direction", which has the rows
            of several layers one after the other; NaN of zeros. Equal vectors too.
    """

    fields: Mapping[str, tuple[Any, Any]]
    cosines: Mapping[str, float]

    @property
    def changes(self) -> dict[str, float]:
        """Second minus first, of the fields that are numbers of both."""
        return {
            name: second - first
            for name, (first, second) in self.fields.items()
            if _is_number(first) and _is_number(second)
        }

    def __bool__(self) -> bool:
        """Return whether anything differs."""
        return bool(self.fields)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: a cosine of zeros is None."""
        cosines = {
            name: cosine if cosine == cosine else None for name, cosine in self.cosines.items()
        }
        return {
            "fields": {name: list(both) for name, both in self.fields.items()},
            "changes": self.changes,
            "cosines": cosines,
        }

    def __str__(self) -> str:
        lines = [f"cosine of {name}: {cosine:.6f}" for name, cosine in self.cosines.items()]
        for name, (first, second) in self.fields.items():
            change = f" ({self.changes[name]:+.4g})" if name in self.changes else ""
            lines.append(f"{name}: {show(first)} → {show(second)}{change}")
        return "\n".join(lines if self else ["no field differs", *lines])


def compare(first: Any, second: Any) -> ProbeDiff:
    """Return what differs between two `Probe`s; see `ProbeDiff`."""
    import numpy as np

    (mine, my_arrays), (theirs, their_arrays) = (_parts(probe) for probe in (first, second))
    fields = {
        name: (mine.get(name), theirs.get(name))
        for name in dict.fromkeys((*mine, *theirs))
        if mine.get(name) != theirs.get(name)
    }
    cosines = {}
    for name in dict.fromkeys((*my_arrays, *their_arrays)):
        pair = [arrays.get(name) for arrays in (my_arrays, their_arrays)]
        shapes = [None if array is None else list(array.shape) for array in pair]
        if shapes[0] != shapes[1]:
            fields[f"{name}.shape"] = (shapes[0], shapes[1])
            continue
        rows = [np.asarray(array, np.float64).ravel() for array in pair]
        if not np.array_equal(rows[0], rows[1]):
            norms = [float(np.linalg.norm(row)) for row in rows]
            fields[f"{name}.norm"] = (norms[0], norms[1])
        # Of unit vectors: squares of large numbers overflow.
        with np.errstate(invalid="ignore", divide="ignore"):
            units = [row / np.linalg.norm(row) for row in rows]
        cosines[name] = float(np.clip(units[0] @ units[1], -1, 1))
    return ProbeDiff(fields, cosines)


def _parts(probe: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return all but the vectors by dotted name, and the vectors."""
    outline, arrays = split(probe.to_dict())
    known = {} if probe.info is None else {"info": probe.info.to_dict()}
    return dict(_flat({**outline, **known}, "")), arrays


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and "tensor" not in value:
        for name, part in value.items():
            yield from _flat(part, f"{path}.{name}" if path else name)
    elif not isinstance(value, Mapping):
        yield path, value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
