"""Registry of names for steering vectors and whole edits, checked against one engine's model."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, overload

from midstream.errors import NoRoomError, SpecError
from midstream.plan.operation import by_value
from midstream.plan.operations import Edit, Gate
from midstream.plan.shape import ModelShape
from midstream.plan.tap_lookup import check_tapped, find_layer, find_taps
from midstream.plan.vectors.matrix import Matrix, matrix_by_value, read_vector_or_matrix
from midstream.plan.vectors.named_lookup import (
    FeatureSource,
    Lookup,
    NamedEdits,
    Registered,
    SaeName,
)
from midstream.plan.vectors.named_vector import read_name
from midstream.plan.vectors.vector import Vector
from midstream.sites import Tap, order
from midstream.steering.changes import Changes
from midstream.steering.edit_forms import bind_part, names_edits, read_named_edits
from midstream.steering.files import is_json_file, read_file, read_json_file, write_json_file
from midstream.steering.listing import Description, Listing
from midstream.steering.parse import Placed, by_tap, read_placed
from midstream.validation import at, hint, kind, listed, show

# Far above practical use; limits the memory that clients can fill.
MAX_NAMES = 4096

_NAMES_SHOWN = 10
# Names that an unknown one is compared with, which takes 0.1 ms each: those of similar length.
_NEAR, _COMPARED = 3, 100
# Names like these are meant as files of vectors.
_FILES = (".safetensors", ".gguf", ".json", ".npy", ".npz", ".pt", ".pth", ".bin")


@dataclass(frozen=True, slots=True)
class NamedEntry:
    """What one name stands for. Immutable; registration replaces the whole entry."""

    found: Registered | NamedEdits
    description: Description

    @property
    def nbytes(self) -> int:
        if isinstance(self.found, NamedEdits):
            return sum(map(_nbytes, self.found.edits))
        return sum(4 * vector.size for vector in self.found.values())


class VectorRegistry:
    """Named vectors and named whole edits of one engine's front end. Thread-safe. A name is
    replaced atomically; running requests keep what they got by value at admission.
    """

    def __init__(self, shape: ModelShape) -> None:
        """Create an empty registry for a model; what does not fit is rejected at registration."""
        self._shape = shape
        # Where changes hold; `shared_folder` replaces it, and what all names stand for.
        self.changes = Changes()
        self.entries: Mapping[str, NamedEntry] = {}
        self._lock = threading.Lock()
        # Returns the registered SAE of a name; the front end sets it.
        self.saes: Callable[[str], FeatureSource] = _no_sae

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def register(self, name: str, vectors: object, room: int | None = None) -> Description:
        """Register vectors or whole edits under a name, replacing what it stood for.

        Args:
            name: a valid name, see `midstream.plan.vectors.named_vector.read_name`.
            vectors: a dict in a form of `read_placed`: {layer: vector}, {site: {layer: vector}} or
                {(site, layer): vector}; a `Direction` or `Directions`; one vector (a value of
                Vector.parse) without a tap, whose layer is given where it is used; or the path of a
                file of vectors (`midstream.steering.files`). Scales are multiplied into their
                vectors. In the place of a vector there may be a matrix [width, width], for
                `Affine(matrix=name)`. Or an edit; or whole edits, `{"base": …, "prompt": …,
                "generated": …, "edits": [Clamp…]}`, see
                `midstream.steering.edit_forms.read_named_edits`; names in them are resolved now.
                Or the path of a `.json` file with the JSON form of any of these dicts.
            room: limit for the vectors of all names together, in bytes; None for no limit.
        """
        with at("name"):
            read_name(name)
        with at("vectors"):
            value = self._read(vectors)
        with self._lock, self.changes.changing():
            before = self.entries.get(name)
            if before is None and len(self.entries) >= MAX_NAMES:
                raise NoRoomError(
                    "name", f"the limit of {MAX_NAMES} names is reached; remove one first"
                )
            count = 1 if before is None else before.description.registered + 1
            entry = NamedEntry(value, _describe(name, value, self._shape, count))
            if room is not None:
                self._check_limit(name, entry, room)
            self.entries = {**self.entries, name: entry}
        return entry.description

    def entry(self, name: str, form: object, registered: int) -> NamedEntry:
        """Return what a name stands for, read from its JSON form; see `form`."""
        value = self._read(form, self._lookup_sae)
        return NamedEntry(value, _describe(name, value, self._shape, registered))

    def list(self) -> Listing:
        """Return the registered names and their descriptions, sorted; prints as a table."""
        return Listing(entry.description for _, entry in sorted(self._current().items()))

    def remove(self, name: str) -> None:
        """Remove a name. Requests that were admitted before keep their vectors."""
        with self._lock, self.changes.changing():
            if name not in self.entries:
                raise self._unknown(name)
            self.entries = {key: entry for key, entry in self.entries.items() if key != name}

    @overload
    def lookup(self, name: str) -> Registered | NamedEdits: ...
    @overload
    def lookup(self, name: SaeName) -> FeatureSource: ...
    def lookup(self, name: str | SaeName) -> Registered | NamedEdits | FeatureSource:
        """Return a name's vectors by (canonical site, layer) or None, or its edits, or SAE."""
        return self.saes(name.name) if isinstance(name, SaeName) else self.show(name)[1]

    def show(self, name: str) -> tuple[Description, Registered | NamedEdits]:
        """Return a name's description, and its vectors or edits, as one consistent pair."""
        entry = self._current().get(name)
        if entry is None:
            raise self._unknown(name)
        return entry.description, entry.found

    def form(self, name: str) -> dict[str, object]:
        """Return what a name stands for as JSON values, which `register` reads."""
        value = self.show(name)[1]
        if isinstance(value, NamedEdits):
            return {"edits": [edit.to_dict() for edit in value.edits]}
        if None in value:
            return dict(value[None].emit())
        return {f"{tap[0]}.{tap[1]}": vector.emit() for tap, vector in value.items() if tap}

    def save(self, name: str, path: str | os.PathLike[str]) -> None:
        """Write what a name stands for to a `.json` file, which `register` reads.

        The file appears, or replaces another one, by a rename.
        """
        write_json_file(path, self.form(name))

    def __getitem__(self, name: str) -> Registered | NamedEdits:
        """Return the vectors of a name by (site, layer), of one without a tap by None; or edits."""
        return self.show(name)[1]

    def __setitem__(self, name: str, vectors: object) -> None:
        """Register vectors, see `register`."""
        self.register(name, vectors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._current())

    def __contains__(self, name: object) -> bool:
        return name in self._current()

    def __len__(self) -> int:
        return len(self._current())

    def __str__(self) -> str:
        return str(self.list())

    def __repr__(self) -> str:
        return f"VectorRegistry({len(self)} names)"

    def _repr_html_(self) -> str:
        return self.list()._repr_html_()

    def _current(self) -> Mapping[str, NamedEntry]:
        self.changes.refresh()
        return self.entries

    def _check_limit(self, name: str, entry: NamedEntry, limit: int) -> None:
        others = sum(
            registered.nbytes for other, registered in self.entries.items() if other != name
        )
        if others + entry.nbytes > limit:
            raise NoRoomError(
                "vectors",
                f"{entry.nbytes} bytes plus {others} registered bytes exceed the limit of {limit}; "
                "remove some names",
            )

    def _unknown(self, name: object) -> SpecError:
        if not isinstance(name, str):
            return SpecError("", f"expected a registered name, `str`, got {kind(name)}")
        known = sorted(self.entries)
        near = [key for key in known if abs(len(key) - len(name)) <= _NEAR]
        more = hint(name, near[:_COMPARED])
        rest = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
        names = f"{listed(known[:_NAMES_SHOWN])}{rest}" if known else "none"
        is_file = os.path.splitext(name)[1] in _FILES
        file = "; register a file first: llm.vectors.register(name, path)" if is_file else ""
        return SpecError(
            "", f"no vectors are registered as {show(name)}{more}; registered: {names}{file}"
        )

    def _lookup_sae(self, name: str | SaeName) -> Any:
        """Look up what an edit by value may name: SAEs alone."""
        if isinstance(name, SaeName):
            return self.saes(name.name)
        raise SpecError("", f"expected an edit by value, got the name {show(name)}")

    def _read(self, vectors: object, lookup: Lookup | None = None) -> Registered | NamedEdits:
        vectors = by_tap(vectors)
        if isinstance(vectors, (str, os.PathLike)) and is_json_file(vectors):
            vectors = read_json_file(vectors)
        if names_edits(vectors):
            parts = read_named_edits(vectors)
            lookup = self.lookup if lookup is None else lookup
            return NamedEdits(
                tuple(edit for part in parts for edit in bind_part(part, lookup, self._shape))
            )
        if isinstance(vectors, (str, os.PathLike)):
            read = read_file(vectors)
        elif isinstance(vectors, Mapping) and "f32" not in vectors:
            read = read_placed(vectors)
        else:
            read = read_vector_or_matrix(vectors)
        if isinstance(read, Vector):
            if _width_of(read) not in self._shape.sizes:
                _check_width(read, self._shape.hidden_size)
            return MappingProxyType({None: read})
        vectors_by_tap: dict[Tap | None, Vector] = {}
        paths: dict[Tap, str] = {}
        for placed in read:
            with at(placed.path):
                tap = placed.site, find_layer(placed.layer, self._shape)
                check_tapped(tap, self._shape, "", "")
                _check_width(placed.vector, self._shape.size(tap))
                if tap in paths:
                    raise SpecError("", f"the same tap as {paths[tap]}")
                paths[tap] = placed.path
                vectors_by_tap[tap] = scaled(placed)
        return MappingProxyType(dict(sorted(vectors_by_tap.items(), key=_in_order)))


def scaled(placed: Placed) -> Vector:
    """Return the vector multiplied by its scale, rounded to float32 once."""
    if placed.scale == 1.0:
        return placed.vector
    if isinstance(placed.vector, Matrix):
        raise SpecError("scale", f"expected 1 with a matrix, got {show(placed.scale)}")
    return Vector.parse(placed.vector.numpy().astype("f8") * placed.scale)


def _width_of(vector: Vector) -> int:
    # A DeviceRow, which may be freed at any time, has no data: SpecError.
    return vector.width if isinstance(vector, Matrix) else len(vector.data) // 4


def _check_width(vector: Vector, width: int) -> None:
    if isinstance(vector, Matrix):
        matrix_by_value(vector, width)
    else:
        by_value(vector, width)


def _in_order(item: tuple[Tap | None, Vector]) -> tuple[int, int]:
    assert item[0] is not None
    return order(item[0])


def _describe(
    name: str, value: Registered | NamedEdits, shape: ModelShape, registered: int
) -> Description:
    content = hashlib.sha256()
    if isinstance(value, NamedEdits):
        taps: set[Tap] = set()
        for edit in value.edits:
            taps.update(find_taps(edit.layers, edit.sites, shape, "layer", "site"))
        content.update(json.dumps([edit.to_dict() for edit in value.edits]).encode())
        return Description(
            name,
            (*sorted(taps, key=order),),
            (),
            shape.hidden_size,
            content.hexdigest(),
            registered,
            tuple(edit.op for edit in value.edits),
        )
    for tap, vector in value.items():
        content.update(f"{tap}:{vector.digest};".encode())
    norms = tuple(vector.norm for vector in value.values())
    size = max(_width_of(vector) for vector in value.values())
    return Description(name, tuple(value), norms, size, content.hexdigest(), registered)


def _no_sae(name: str) -> FeatureSource:
    raise SpecError("", f"there is no SAE {show(name)}")


def _nbytes(edit: Edit) -> int:
    if isinstance(edit, Gate):
        direction = edit.probe.direction
        read = direction if isinstance(direction, tuple) else (direction,)
        return _nbytes(edit.edit) + sum(4 * row.size for row in read if isinstance(row, Vector))
    values = edit.own().values()
    rows = [row for value in values for row in (value if isinstance(value, tuple) else (value,))]
    return sum(4 * row.size for row in rows if isinstance(row, Vector))
