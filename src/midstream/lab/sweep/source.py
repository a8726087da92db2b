"""Sources of a sweep: what is put in place of the vectors of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.plan.captured_rows import CapturedRows, is_captured
from midstream.plan.heads import read_indices
from midstream.plan.operation import read_scalar
from midstream.plan.vectors.matrix import emit_rows, read_rows
from midstream.plan.vectors.named_vector import Named
from midstream.results.arrays import to_numpy
from midstream.sites import Tap, parse
from midstream.validation import MAX_ITEMS, at, is_int, kind, read_fields, read_int

if TYPE_CHECKING:
    from midstream.results.activations import Activations

_MEAN = "mean:"
_FORMS = (
    'a prompt (text, token ids or messages), 0 or "zero", "mean:NAME" or Named(NAME), an output '
    "of generate with activations, its activations, or {(site, layer): rows}"
)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Another prompt, run unpatched: its vectors at the same sites and layers."""

    prompt: Any

    def emit(self) -> object:
        return self.prompt


@dataclass(frozen=True, slots=True)
class ZeroSource:
    """Zero: ablation."""

    def emit(self) -> object:
        return 0


@dataclass(frozen=True, slots=True)
class NumberSource:
    """An activation, not 0, for features of an SAE."""

    value: float

    def emit(self) -> object:
        return self.value


@dataclass(frozen=True, slots=True)
class NameSource:
    """A registered vector for all positions: mean ablation, if it is a mean."""

    name: str

    def emit(self) -> object:
        return {"name": self.name}


@dataclass(frozen=True, eq=False)
class RowsSource:
    """Rows by value, float32 [rows, width]."""

    rows: Mapping[Tap, NDArray[np.float32]]
    positions: Mapping[Tap, tuple[int, ...]]  # in the source prompt; (): one row for all
    length: int  # tokens of the source prompt
    prompt: tuple[int, ...] | None = None  # its token ids; None: not known
    has_end: bool = True  # False: `length` is that up to the last row

    def emit(self) -> object:
        """Return the JSON form, with positions unless rows are one for all or for each from 0."""
        fields: dict[str, object] = {
            "rows": {
                f"{site}.{layer}": emit_rows(read_rows(rows, MAX_ITEMS))
                for (site, layer), rows in self.rows.items()
            },
        }
        counts = {len(rows) for rows in self.rows.values()}
        default = _default_positions(self.rows)
        if len(counts) > 1 or default != self.positions or counts != {self.length}:
            fields["positions"] = {
                f"{site}.{layer}": list(positions)
                for (site, layer), positions in self.positions.items()
            }
            fields["length"] = self.length
        if self.prompt is not None:
            fields["prompt_token_ids"] = list(self.prompt)
        return fields


Source = PromptSource | ZeroSource | NumberSource | NameSource | RowsSource | CapturedRows


def read_source(value: Any) -> Source:
    """Read a source from any of its forms. A text is a prompt, except "zero" and "mean:NAME"."""
    if is_captured(value):
        return _read_captured(CapturedRows.parse(value))
    if isinstance(value, Source):
        return value
    if isinstance(value, str):
        return _read_text(value)
    if is_int(value) or isinstance(value, float):
        number = read_scalar(value)
        return NumberSource(number) if number else ZeroSource()
    if isinstance(value, Named):
        return _named(value)
    if hasattr(value, "positions_of") and hasattr(value, "items"):
        return _of_activations(value, None)
    if hasattr(value, "prompt_token_ids") and hasattr(value, "outputs"):
        return _of_output(value)
    if isinstance(value, Mapping):
        return _read_mapping(value)
    if isinstance(value, (list, tuple)) and value:
        return PromptSource(value)
    raise SpecError("", f"expected {_FORMS}, got {kind(value)}")


def _read_captured(value: CapturedRows) -> CapturedRows:
    if value.layer is not None:
        raise SpecError("layer", "unsupported in a sweep: each layer gets its own rows; omit it")
    return value


def _read_text(value: str) -> Source:
    if value == "zero":
        return ZeroSource()
    if value.startswith(_MEAN):
        return _named(Named(value.removeprefix(_MEAN)))
    if not value:
        raise SpecError("", f"expected {_FORMS}, got an empty text")
    return PromptSource(value)


def _read_mapping(value: Mapping[Any, Any]) -> Source:
    keys = set(value)
    if keys == {"name"}:
        return _named(Named.parse(value))
    if "rows" in keys and isinstance(value["rows"], Mapping):
        return _of_dict(value)
    if keys & {"prompt", "prompt_token_ids"}:
        return PromptSource(value)
    return _of_mapping(value)


def _named(value: Named) -> NameSource:
    if value.scale != 1.0:
        raise SpecError("scale", f"expected 1, because `{value.name}` is used as it is registered")
    return NameSource(value.name)


def _of_dict(value: Mapping[Any, Any]) -> RowsSource:
    """Read what `RowsSource.emit` returns."""
    fields = read_fields(value, ("rows",), ("positions", "length", "prompt_token_ids"))
    with at("rows"):
        rows = _read_taps(fields["rows"])
    prompt = None
    if "prompt_token_ids" in fields:
        with at("prompt_token_ids"):
            prompt = tuple(map(read_int, _sequence(fields["prompt_token_ids"])))
    if "positions" not in fields:
        if "length" in fields:
            raise SpecError("length", "there are no positions; omit it")
        source = _of_mapping(fields["rows"])
        return replace(source, prompt=prompt)
    places = fields["positions"]
    with at("positions"):
        if not isinstance(places, Mapping):
            raise SpecError("", f"expected positions by site and layer, got {kind(places)}")
        positions = {_read_tap(key): _read_places(tap_places) for key, tap_places in places.items()}
        if positions.keys() != rows.keys():
            raise SpecError("", "expected the sites and layers of `rows`")
        for tap, tap_rows in rows.items():
            if len(positions[tap]) != len(tap_rows):
                raise SpecError(
                    f"{tap[0]}.{tap[1]}",
                    f"expected {len(tap_rows)}, one for each row, got {len(positions[tap])}",
                )
    last = max(max(tap_positions) for tap_positions in positions.values())
    length = read_int(fields.get("length", last + 1))
    if length <= last:
        raise SpecError("length", f"expected more than the last position, {last}, got {length}")
    return RowsSource(rows, positions, length, prompt)


def _read_places(value: object) -> tuple[int, ...]:
    indices = read_indices(value, "")
    if list(indices) != list(_sequence(value)):
        raise SpecError("", "expected positions in ascending order, as the rows are")
    return indices


def _sequence(value: object) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise SpecError("", f"expected a list, got {kind(value)}")
    return list(value)


def _of_mapping(value: Mapping[Any, Any]) -> RowsSource:
    """Read rows by (site, layer), or by a name with both; those of a prompt from position 0."""
    rows = _read_taps(value)
    counts = {len(tap_rows) for tap_rows in rows.values()}
    if len(counts) > 1:
        raise SpecError("", f"expected as many rows at each site and layer, got {sorted(counts)}")
    (count,) = counts
    return RowsSource(rows, _default_positions(rows), count)


def _default_positions(rows: Mapping[Tap, NDArray[np.float32]]) -> dict[Tap, tuple[int, ...]]:
    """Return the positions of rows that are one for all positions, or one for each from 0."""
    return {
        tap: () if len(tap_rows) == 1 else tuple(range(len(tap_rows)))
        for tap, tap_rows in rows.items()
    }


def _read_taps(value: Mapping[Any, Any]) -> dict[Tap, NDArray[np.float32]]:
    if not value:
        raise SpecError("", "expected rows of at least one site and layer")
    rows: dict[Tap, NDArray[np.float32]] = {}
    for key, array in value.items():
        tap = _read_tap(key)
        with at(f"[{key!r}]"):
            if tap in rows:
                raise SpecError("", f"rows of {tap[0]} at layer {tap[1]} are given twice")
            if len(getattr(array, "shape", ())) == 3:
                array = array.reshape(array.shape[0], -1)
            vectors = read_rows(array, MAX_ITEMS)
            rows[tap] = np.stack([vector.numpy() for vector in vectors])
    return rows


def _of_activations(value: Activations, prompt: tuple[int, ...] | None) -> RowsSource:
    rows, positions = {}, {}
    last = -1
    for tap, tap_rows in value.items():
        if not len(tap_rows):  # none of its positions was reached
            continue
        rows[tap] = np.ascontiguousarray(to_numpy(tap_rows).reshape(len(tap_rows), -1), np.float32)
        positions[tap] = tuple(int(position) for position in value.positions_of(*tap))
        last = max(last, *positions[tap])
    if not rows:
        raise SpecError("", "these activations have no rows")
    length = last + 1 if prompt is None else len(prompt)
    return RowsSource(rows, positions, length, prompt, has_end=prompt is not None)


def _of_output(value: Any) -> RowsSource:
    activations = value.activations
    if activations is None:
        raise SpecError(
            "", "this output has no activations; capture them: generate(…, capture=Capture(…))"
        )
    return _of_activations(activations, tuple(value.prompt_token_ids))


def _read_tap(key: object) -> Tap:
    if isinstance(key, str):
        named = parse(key)
        if named is not None and named[1] is not None:
            return named[0], named[1]
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and is_int(key[1]):
        named = parse(key[0])
        if named is not None and named[1] is None and int(key[1]) >= 0:
            return named[0], int(key[1])
    raise SpecError(
        "",
        f"expected rows by (site, layer), such as ('resid_pre', 3) or 'resid_pre.3', got {key!r}",
    )
