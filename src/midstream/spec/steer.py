"""A request to add a vector."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.errors import SpecError
from midstream.spec.fields import at, read_fields, read_float32, read_int, read_word
from midstream.spec.positions import Positions
from midstream.spec.selection import read_site
from midstream.spec.vector import Vector

OPS = ("steer",)

_OPTIONAL = ("op", "scale", "site", "positions", "phase")


@dataclass(frozen=True, slots=True, init=False)
class Steer:
    """Add scale · vector to some tokens, at one site of one layer: h ← h + scale · v.

    Attributes:
        vector: v, as wide as the model.
        layer: the layer's index; −1 is the last layer.
        scale: finite, within float32's range.
        site: canonical name.
        positions: never "last", which is known only when nothing is left to compute.
    """

    vector: Vector
    layer: int
    scale: float
    site: str
    positions: Positions

    def __init__(
        self,
        vector: object,
        layer: object,
        scale: object = 1.0,
        site: object = "resid_post",
        positions: object = "all",
        phase: object = None,
    ) -> None:
        """Reads each field in any of its forms.

        Args:
            vector: what Vector.parse takes: a list, array, tensor or base64.
            layer: an int.
            scale: a number.
            site: a site's name or alias.
            positions: what Positions takes, but for "last".
            phase: "prompt" or "generated" leaves only such tokens of the positions.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("vector"):
            object.__setattr__(self, "vector", Vector.parse(vector))
        with at("layer"):
            object.__setattr__(self, "layer", read_int(layer))
        with at("scale"):
            # Adding 0.0 leaves no −0.0, which is equal to 0.0 but would not be emitted alike.
            object.__setattr__(self, "scale", read_float32(scale) + 0.0)
        with at("site"):
            object.__setattr__(self, "site", read_site(site))
        found = Positions.within(positions, phase)
        if "last" in found.include:
            raise SpecError(
                found.path(found.include.index("last")),
                '"last" is known only when generation has ended, so nothing can be edited there; '
                'use "last_prompt" or "generated"',
            )
        object.__setattr__(self, "positions", found)

    @staticmethod
    def parse(value: object) -> Steer:
        """A Steer, or a dict of the constructor's arguments and optionally `"op": "steer"`.

        Raises:
            SpecError: a field is unknown, missing or malformed.
        """
        if isinstance(value, Steer):
            return value
        given = read_fields(value, required=("vector", "layer"), optional=_OPTIONAL)
        with at("op"):
            read_word(given.pop("op", "steer"), OPS)
        return Steer(**given)

    def to_dict(self) -> dict[str, object]:
        """The JSON form, with every field, which `parse` reads back."""
        return {
            "op": "steer",
            "vector": self.vector.emit(),
            "layer": self.layer,
            "scale": self.scale,
            "site": self.site,
            "positions": self.positions.emit(),
            "phase": self.positions.phase,
        }
