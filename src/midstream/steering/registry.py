"""Registry of named steering vectors, checked against one engine's model."""

from __future__ import annotations

import difflib
import hashlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from midstream.errors import NoRoomError, SpecError
from midstream.sites import Tap, order
from midstream.spec.named_lookup import Registered
from midstream.spec.named_vector import read_name
from midstream.spec.resolve.tap_lookup import check_tapped, find_layer
from midstream.spec.shape import ModelShape
from midstream.spec.vector import Vector
from midstream.steering.files import read_file
from midstream.steering.listing import Description, Listing
from midstream.steering.parse import Placed, read_placed
from midstream.validation import at, kind, listed, show

# Far above practical use; limits the memory that clients can fill.
MAX_NAMES = 4096

_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class _Entry:
    """The vectors of one name. Immutable; registration replaces the whole entry."""

    vectors: Registered
    description: Description

    @property
    def nbytes(self) -> int:
        return 4 * self.description.width * len(self.description.taps)


class VectorRegistry:
    """Named vectors of one engine's front end. Thread-safe.

    A name is replaced atomically: a lookup returns either the old or the new vectors. Requests get
    vectors by value at admission, so running requests keep theirs.
    """

    def __init__(self, shape: ModelShape) -> None:
        """Create an empty registry.

        Args:
            shape: the model and its taps; vectors that do not fit are rejected at registration.
        """
        self._shape = shape
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    @property
    def shape(self) -> ModelShape:
        """Shape of the engine's model."""
        return self._shape

    def register(self, name: str, vectors: object, room: int | None = None) -> Description:
        """Register vectors under a name, replacing any earlier ones.

        Args:
            name: a valid name, see `midstream.spec.named_vector.read_name`.
            vectors: a dict in a form of `read_placed`: {layer: vector}, {site: {layer: vector}} or
                {(site, layer): vector}; one vector (a value of Vector.parse) without a tap, whose
                layer is given where it is used; or the path of a `.safetensors`, `.npz` or `.gguf`
                file (`midstream.steering.files`). Scales are multiplied into their vectors.
            room: limit for the vectors of all names together, in bytes; None for no limit.

        Returns:
            The description of the registered vectors.

        Raises:
            NoRoomError: the limit of bytes or of names would be exceeded.
            SpecError: the name or the vectors are malformed, a vector's size is not the model's
                hidden size, a layer does not exist, or a site is not tapped. Nothing is changed.
        """
        with at("name"):
            read_name(name)
        with at("vectors"):
            found = self._read(vectors)
        with self._lock:
            before = self._entries.get(name)
            if before is None and len(self._entries) >= MAX_NAMES:
                raise NoRoomError(
                    "name", f"the limit of {MAX_NAMES} names is reached; remove one first"
                )
            count = 1 if before is None else before.description.registered + 1
            entry = _Entry(found, _describe(name, found, count))
            if room is not None:
                self._check_limit(name, entry, room)
            self._entries[name] = entry
        return entry.description

    def list(self) -> Listing:
        """Return the registered names and their descriptions, sorted; prints as a table."""
        with self._lock:
            entries = tuple(self._entries.items())
        return Listing(entry.description for _, entry in sorted(entries))

    def remove(self, name: str) -> None:
        """Remove a name. Requests that were admitted before keep their vectors.

        Raises:
            SpecError: the name is not registered.
        """
        with self._lock:
            if name not in self._entries:
                raise self._unknown(name)
            del self._entries[name]

    def lookup(self, name: str) -> Registered:
        """Return the vectors of a name, read-only, by (canonical site, layer from 0).

        The only key is None for a vector without a tap.

        Raises:
            SpecError: the name is not registered; the path is empty.
        """
        return self.show(name)[1]

    def show(self, name: str) -> tuple[Description, Registered]:
        """Return a name's description and vectors as one consistent pair.

        Raises:
            SpecError: the name is not registered; the path is empty.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise self._unknown(name)
        return entry.description, entry.vectors

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __str__(self) -> str:
        return str(self.list())

    def __repr__(self) -> str:
        return f"VectorRegistry({len(self)} names)"

    def _repr_html_(self) -> str:
        return self.list()._repr_html_()

    def _check_limit(self, name: str, entry: _Entry, limit: int) -> None:
        others = sum(one.nbytes for other, one in self._entries.items() if other != name)
        if others + entry.nbytes > limit:
            raise NoRoomError(
                "vectors",
                f"{entry.nbytes} bytes plus {others} registered bytes exceed the limit of {limit}; "
                "remove some names",
            )

    def _unknown(self, name: object) -> SpecError:
        if not isinstance(name, str):
            return SpecError("", f"expected a registered name, `str`, got {kind(name)}")
        known = sorted(self._entries)
        close = difflib.get_close_matches(name[:128], known, 1)
        more = f" (did you mean `{close[0]}`?)" if close else ""
        rest = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
        names = f"{listed(known[:_NAMES_SHOWN])}{rest}" if known else "none"
        return SpecError(
            "", f"no vectors are registered as {show(name)}{more}; registered: {names}"
        )

    def _read(self, vectors: object) -> Registered:
        if isinstance(vectors, (str, os.PathLike)):
            read = read_file(vectors)
        elif isinstance(vectors, Mapping) and "f32" not in vectors:
            read = read_placed(vectors)
        else:
            read = Vector.parse(vectors)
        if isinstance(read, Vector):
            self._check_width(read)
            return MappingProxyType({None: read})
        found: dict[Tap | None, Vector] = {}
        paths: dict[Tap, str] = {}
        for one in read:
            with at(one.path):
                tap = self._tap(one)
                if tap in paths:
                    raise SpecError("", f"the same tap as {paths[tap]}")
                paths[tap] = one.path
                found[tap] = scaled(one)
        return MappingProxyType(dict(sorted(found.items(), key=_in_order)))

    def _tap(self, one: Placed) -> Tap:
        self._check_width(one.vector)
        tap = (one.site, find_layer(one.layer, self._shape))
        check_tapped(tap, self._shape, "", "")
        return tap

    def _check_width(self, vector: Vector) -> None:
        width = self._shape.hidden_size
        if vector.size != width:
            raise SpecError(
                "", f"expected {width} numbers, the model's hidden size, got {vector.size}"
            )


def scaled(one: Placed) -> Vector:
    """Return the vector multiplied by its scale, rounded to float32 once.

    Raises:
        SpecError: the product overflows float32.
    """
    if one.scale == 1.0:
        return one.vector
    return Vector.parse(one.vector.numpy().astype("f8") * one.scale)


def _in_order(item: tuple[Tap | None, Vector]) -> tuple[int, int]:
    assert item[0] is not None
    return order(item[0])


def _describe(name: str, vectors: Registered, registered: int) -> Description:
    content = hashlib.sha256()
    for tap, vector in vectors.items():
        content.update(f"{tap}:{vector.digest};".encode())
    first = next(iter(vectors.values()))
    return Description(
        name,
        tuple(vectors),
        tuple(vector.norm for vector in vectors.values()),
        first.size,
        content.hexdigest(),
        registered,
    )
