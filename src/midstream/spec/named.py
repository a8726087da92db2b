"""A vector by the name under which it is registered, in place of its numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from midstream.errors import SpecError
from midstream.spec.fields import at, kind, read_fields, read_float32, show
from midstream.spec.vector import Vector

_NAME = re.compile(r"[A-Za-z0-9_:-][A-Za-z0-9_.:/-]{0,127}")


def read_name(value: object) -> str:
    """A name: 1 to 128 of the characters A–Z a–z 0–9 _ . : / - and no dot or slash first."""
    if not isinstance(value, str):
        raise SpecError("", f"expected a name, `str`, got {kind(value)}")
    if not _NAME.fullmatch(value):
        raise SpecError(
            "",
            "expected 1 to 128 of the characters A-Z a-z 0-9 _ . : / -, the first no dot or "
            f"slash, got {show(value)}",
        )
    return value


@dataclass(frozen=True, slots=True)
class Named:
    """A registered vector, times a number.

    Attributes:
        name: 1 to 128 of the characters A–Z a–z 0–9 _ . : / - and no dot or slash first.
        scale: finite, within float32's range. Multiplies the scale of the edit that adds the
            vector; where only the direction counts, a scale other than 1 is refused.

    Raises:
        SpecError: a field is malformed.
    """

    name: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        with at("name"):
            object.__setattr__(self, "name", read_name(self.name))
        with at("scale"):
            # Adding 0.0 leaves no −0.0, which is equal to 0.0 but would not be emitted alike.
            object.__setattr__(self, "scale", read_float32(self.scale) + 0.0)

    @staticmethod
    def parse(value: object) -> Named:
        """A Named, its name as `str`, or `{"name": …, "scale": …}`, of which `scale` is optional.

        Raises:
            SpecError: something else, or a field is unknown, missing or malformed.
        """
        if isinstance(value, Named):
            return value
        if isinstance(value, str):
            return Named(read_name(value))
        return Named(**read_fields(value, required=("name",), optional=("scale",)))  # type: ignore[arg-type]

    def emit(self) -> dict[str, object]:
        """The JSON form, which `parse` reads back."""
        return {"name": self.name, "scale": self.scale}


def is_named(value: object) -> bool:
    """Whether `value` is a name in one of its forms, and not the vector itself."""
    return isinstance(value, (Named, str)) or (isinstance(value, Mapping) and "name" in value)


def read_vector(value: object) -> Vector | Named:
    """A vector by value, in any form of Vector.parse, or by name, in any form of Named.parse."""
    return Named.parse(value) if is_named(value) else Vector.parse(value)


def read_direction(value: object) -> Vector | Named:
    """As `read_vector`, where the length of the vector is not part of what is asked."""
    found = read_vector(value)
    if isinstance(found, Named) and found.scale != 1.0:
        raise SpecError(
            "scale",
            f"`{found.name}` is meant as a direction here, which has no scale; got "
            f"{show(found.scale)}",
        )
    return found
