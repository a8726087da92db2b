"""`Named`: a reference to a registered vector by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from midstream.errors import SpecError
from midstream.plan.vectors.vector import Vector
from midstream.validation import at, kind, read_fields, read_float32, show

_NAME = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9_.:/-]{0,127}")


def read_name(value: object) -> str:
    if not isinstance(value, str):
        raise SpecError("", f"expected a name, `str`, got {kind(value)}")
    if not _NAME.fullmatch(value):
        raise SpecError(
            "",
            "expected 1 to 128 of the characters A-Z a-z 0-9 _ . : / -, not starting with a dot "
            f"or slash, got {show(value)}",
        )
    return value


@dataclass(frozen=True, slots=True)
class Named:
    """A registered vector, multiplied by a scale.

    Attributes:
        name: 1 to 128 of the characters A–Z a–z 0–9 _ . : / -, not starting with a dot or slash.
        scale: finite, within float32's range. Multiplies the scale of the edit that adds the
            vector. Must be 1 where only the direction of the vector matters.

    Raises:
        SpecError: a field is malformed.
    """

    name: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        with at("name"):
            object.__setattr__(self, "name", read_name(self.name))
        with at("scale"):
            # Adding 0.0 turns −0.0, which equals 0.0 but has another JSON form, into 0.0.
            object.__setattr__(self, "scale", read_float32(self.scale) + 0.0)

    @staticmethod
    def parse(value: object) -> Named:
        """Read a Named, a name as `str`, or `{"name": …, "scale": …}` (`scale` is optional)."""
        if isinstance(value, Named):
            return value
        if isinstance(value, str):
            return Named(read_name(value))
        return Named(**read_fields(value, required=("name",), optional=("scale",)))

    def emit(self) -> dict[str, object]:
        """Return the JSON form, which `parse` reads."""
        return {"name": self.name, "scale": self.scale}


def is_named(value: object) -> bool:
    """Return whether `value` is a form of Named rather than of Vector."""
    return isinstance(value, (Named, str)) or (isinstance(value, Mapping) and "name" in value)


def read_vector(value: object) -> Vector | Named:
    """Read a vector by value (any form of Vector.parse) or by name (any form of Named.parse)."""
    return Named.parse(value) if is_named(value) else Vector.parse(value)


def read_direction(value: object) -> Vector | Named:
    """Read a vector like `read_vector`, of which only the direction is used."""
    return _unscaled(value, "only the direction of `{}` is used here")


def read_row(value: object) -> Vector | Named:
    """Read a vector like `read_vector`, which is used as it is."""
    return _unscaled(value, "`{}` is used as it is registered here")


def _unscaled(value: object, why: str) -> Vector | Named:
    vector = read_vector(value)
    if isinstance(vector, Named) and vector.scale != 1.0:
        reason = why.format(vector.name)
        raise SpecError("scale", f"expected 1, because {reason}, got {show(vector.scale)}")
    return vector
