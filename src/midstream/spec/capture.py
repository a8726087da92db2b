"""A request to read vectors."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.spec.fields import at, read_fields
from midstream.spec.positions import Positions
from midstream.spec.selection import Layers, Sites

_OPTIONAL = ("sites", "positions", "phase", "exclude")


@dataclass(frozen=True, slots=True, init=False)
class Capture:
    """Read the vectors of some tokens, at each of some sites of each of some layers."""

    layers: Layers
    sites: Sites
    positions: Positions

    def __init__(
        self,
        layers: object,
        sites: object = "resid_post",
        positions: object = "all",
        phase: object = None,
        exclude: object = None,
    ) -> None:
        """Reads each field in any of its forms.

        Args:
            layers: what Layers takes: "all", an int, or a list, tuple or range of ints.
            sites: what Sites takes: a name or a list of names.
            positions: what Positions takes.
            phase: "prompt" or "generated" leaves only such tokens of the positions.
            exclude: positions to leave out.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("layers"):
            object.__setattr__(self, "layers", Layers.parse(layers))
        with at("sites"):
            object.__setattr__(self, "sites", Sites.parse(sites))
        object.__setattr__(self, "positions", Positions.within(positions, phase, exclude))

    @staticmethod
    def parse(value: object) -> Capture:
        """A Capture, or a dict of the constructor's arguments.

        Raises:
            SpecError: a field is unknown, missing or malformed.
        """
        if isinstance(value, Capture):
            return value
        return Capture(**read_fields(value, required=("layers",), optional=_OPTIONAL))

    def to_dict(self) -> dict[str, object]:
        """The JSON form, with every field, which `parse` reads back."""
        return {
            "layers": self.layers.emit(),
            "sites": self.sites.emit(),
            **self.positions.to_dict(),
        }
