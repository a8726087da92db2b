"""Steering vectors by name, checked against one engine's model."""

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

# Far above what anybody registers: bounds what a server can be made to hold.
MAX_NAMES = 4096

_NAMES_SHOWN = 10


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one name stands for; never changed, only replaced as a whole."""

    vectors: Registered
    description: Description

    @property
    def nbytes(self) -> int:
        return 4 * self.description.width * len(self.description.taps)


class VectorRegistry:
    """Names for vectors, on one engine's front end. Any thread may use it.

    Names are replaced whole: whoever looks one up gets the old vectors or the new ones. A request
    is given vectors by value when it is taken in, so those that run keep theirs.
    """

    def __init__(self, shape: ModelShape) -> None:
        """An empty registry.

        Args:
            shape: the model and its taps; what does not fit it is refused when registered.
        """
        self._shape = shape
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()

    @property
    def shape(self) -> ModelShape:
        """The model whose vectors these are."""
        return self._shape

    def register(self, name: str, vectors: object, room: int | None = None) -> Description:
        """Registers vectors under a name, in place of what was there.

        Args:
            name: what `midstream.spec.named_vector.read_name` takes.
            vectors: a dict in a form of `read_placed`: {layer: vector}, {site: {layer: vector}} or
                {(site, layer): vector}; one vector (what Vector.parse takes), for no tap in
                particular, so that its layer is given where it is used; or the path of a
                `.safetensors`, `.npz` or `.gguf` file (`midstream.steering.files`). A scale within
                is multiplied into its vector.
            room: how many bytes the vectors of all names may take together; None: any number.

        Raises:
            NoRoomError: they would take more, or there are as many names as there may be.
            SpecError: the name or the vectors are malformed; a vector is not as wide as the model;
                there is no such layer; or the site is not tapped there. Nothing is changed then.
        """
        with at("name"):
            read_name(name)
        with at("vectors"):
            found = self._read(vectors)
        with self._lock:
            before = self._entries.get(name)
            if before is None and len(self._entries) >= MAX_NAMES:
                raise NoRoomError("name", f"{MAX_NAMES} names are registered; remove one first")
            count = 1 if before is None else before.description.registered + 1
            entry = _Entry(found, _describe(name, found, count))
            if room is not None:
                self._check_room(name, entry, room)
            self._entries[name] = entry
        return entry.description

    def list(self) -> Listing:
        """What is registered now, by name; prints as a table."""
        with self._lock:
            entries = tuple(self._entries.items())
        return Listing(entry.description for _, entry in sorted(entries))

    def remove(self, name: str) -> None:
        """Forgets a name. Requests that were taken in with it keep their vectors.

        Raises:
            SpecError: there is no such name.
        """
        with self._lock:
            if name not in self._entries:
                raise self._unknown(name)
            del self._entries[name]

    def lookup(self, name: str) -> Registered:
        """The vectors of a name, read-only, by (canonical site, layer from 0); the only key is
        None where it is a vector for no tap in particular.

        Raises:
            SpecError: there is no such name; its path is empty.
        """
        return self.show(name)[1]

    def show(self, name: str) -> tuple[Description, Registered]:
        """What `list` and `lookup` have of a name, at one moment.

        Raises:
            SpecError: there is no such name; its path is empty.
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

    def _check_room(self, name: str, entry: _Entry, room: int) -> None:
        others = sum(one.nbytes for other, one in self._entries.items() if other != name)
        if others + entry.nbytes > room:
            raise NoRoomError(
                "vectors",
                f"{entry.nbytes} bytes are more than there is room for beside the {others} that "
                f"are registered, of {room}; remove some",
            )

    def _unknown(self, name: object) -> SpecError:
        if not isinstance(name, str):
            return SpecError("", f"expected a registered name, `str`, got {kind(name)}")
        known = sorted(self._entries)
        close = difflib.get_close_matches(name[:128], known, 1)
        more = f" (did you mean `{close[0]}`?)" if close else ""
        rest = f" and {len(known) - _NAMES_SHOWN} more" if len(known) > _NAMES_SHOWN else ""
        there = f"{listed(known[:_NAMES_SHOWN])}{rest}" if known else "none"
        return SpecError(
            "", f"no vectors are registered as {show(name)}{more}; registered: {there}"
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
    """The vector with its scale multiplied in, rounded to float32 once.

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
