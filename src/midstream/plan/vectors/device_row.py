"""`DeviceRow`: a captured row that is in the workers' device memory, as a vector of an edit."""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Callable, Collection
from typing import Any

from midstream.errors import SpecError
from midstream.plan.vectors.vector import Vector
from midstream.sites import Tap, show_tap


class DeviceSource:
    """The rows that one request left on the device; see `Capture(reduce="device")`. They are freed
    with the last reference to it, or by `free`, once no running request has them in its edits.

    Attributes:
        id: of that request; no other request of an engine ever has it.
        width: numbers of a row.
        taps: the sites and layers that have rows.
    """

    __slots__ = ("__weakref__", "_freed", "id", "taps", "width")

    def __init__(
        self, id: str, width: int, taps: Collection[Tap], freed: Callable[[str], object]
    ) -> None:
        """Create it; `freed` is called with its id, once, in any thread."""
        self.id = id
        self.width = width
        self.taps = frozenset(taps)
        self._freed = weakref.finalize(self, freed, id)
        self._freed.atexit = False

    def free(self) -> None:
        """Free the rows now: later requests cannot have them. Later calls do nothing."""
        self._freed()

    def row(self, tap: Tap, position: int, norm: float) -> DeviceRow:
        """Return the row of a token, whose norm is known on the host. SpecError: it is infinite."""
        return DeviceRow(self.id, tap, position, self.width, norm)


class DeviceRow(Vector):
    """A row by the request that it is of, its site and layer, and its position: no number of it is
    on the host but its norm. Rows are equal if these are: a request's rows never change.

    Attributes:
        source: id of the request; see `DeviceSource`.
        tap: site and layer.
        position: of its token, counted from 0.
        is_unit: whether it stands for the row divided by its norm.
        digest: sha256 of these, in hex.
    """

    __slots__ = ("is_unit", "length", "numbers", "position", "source", "tap")

    source: str
    tap: Tap
    position: int
    is_unit: bool
    numbers: int
    length: float

    def __init__(
        self,
        source: str,
        tap: Tap,
        position: int,
        size: int,
        norm: float = 1.0,
        is_unit: bool = False,
    ) -> None:
        if not math.isfinite(norm):
            problem = f"row of {show_tap(tap)} at position {position} has a norm of {norm}"
            raise SpecError("", f"the {problem}; expected finite numbers")
        values = {"source": source, "tap": tap, "position": position, "is_unit": is_unit}
        content = repr(("device row", source, *tap, position, size, is_unit))
        digest = hashlib.sha256(content.encode()).hexdigest()
        for name, value in {**values, "numbers": size, "length": norm, "digest": digest}.items():
            object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DeviceRow) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> Any:
        own = self.source, self.tap, self.position, self.numbers, self.length, self.is_unit
        return DeviceRow, own

    def unit(self) -> DeviceRow:
        return DeviceRow(self.source, self.tap, self.position, self.numbers, 1.0, is_unit=True)

    @property
    def data(self) -> bytes:
        """SpecError: the numbers are not on the host."""
        raise self.only_written()

    def only_written(self) -> SpecError:
        """Return the error of a use other than as a row that an edit writes."""
        return SpecError(
            "",
            f"this row of {show_tap(self.tap)} is on the device alone, and can be used "
            "only as a row of a Steer or a Replace of a request; capture it without "
            'reduce="device" to have its numbers',
        )

    @property
    def size(self) -> int:
        return self.numbers

    @property
    def norm(self) -> float:
        return self.length

    def __repr__(self) -> str:
        site, layer = self.tap
        return f"DeviceRow({site} {layer}, position {self.position}, norm={self.norm:.3g})"
