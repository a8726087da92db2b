"""`Steer`: adding a steering vector to h."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from midstream.ops.layout import Flags, Op
from midstream.spec.algebra import check_nonzero, float32, unit
from midstream.spec.instructions import Instruction
from midstream.spec.named_vector import Named, read_vector
from midstream.spec.operation import Operation, by_value, one_edit, read_scalar
from midstream.spec.vector import Vector
from midstream.validation import at, read_word

NORMS = ("match", "keep")


@dataclass(frozen=True, slots=True, init=False)
class Steer(Operation):
    """Add a steering vector to the selected tokens: h ← h + scale · v.

    With `norm="match"` the vector is first rescaled to the norm of h:
    h ← h + scale · (‖h‖/‖v‖) · v. With `norm="keep"` the sum is rescaled to the norm of h:
    s = h + scale · v, h ← (‖h‖/‖s‖) · s.

    Turner et al. 2023 (activation addition, arXiv:2308.10248), Rimsky et al. 2024 (contrastive
    activation addition, arXiv:2312.06681), Zou et al. 2023 (representation engineering,
    arXiv:2310.01405).

    Attributes:
        vector: v, a vector of the model's hidden size; or a name, whose scale multiplies `scale`.
        scale: finite, within float32's range.
        norm: None, "match" or "keep".
    """

    op = "steer"

    vector: Vector | Named
    scale: float
    norm: str | None

    def __init__(
        self,
        vector: object,
        layer: object = None,
        scale: object = 1.0,
        site: object = None,
        positions: object = "all",
        phase: object = None,
        norm: object = None,
        exclude: object = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            vector: any form of Vector.parse: a list, array, tensor or base64; or the name of a
                registered vector, as `str`, Named or `{"name": …, "scale": …}`.
            layer: "all", an int, or a list, tuple or range of ints. May be omitted for a name:
                see `bind`.
            scale: a number.
            site: a site's name or alias, or a list of these; default "resid_post", or for a name
                the sites it is registered for.
            positions: any form of Positions, except "last".
            phase: "prompt" or "generated" restricts the positions to tokens of that phase.
            norm: None, "match", or "keep"; "match" requires a nonzero vector.
            exclude: positions to exclude.

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        with at("norm"):
            self._set(norm=None if norm is None else read_word(norm, NORMS))
        with at("vector"):
            found = read_vector(vector)
            if self.norm == "match" and isinstance(found, Vector):
                check_nonzero(found, 'the vector is zero; norm="match" requires a nonzero vector')
            self._set(vector=found)
        with at("scale"):
            self._set(scale=read_scalar(scale))
        self._set_place(layer, site, positions, phase, exclude)

    def own(self) -> dict[str, Any]:
        return {"vector": self.vector, "scale": self.scale, "norm": self.norm}

    def bound(self, vectors: dict[str, Vector]) -> dict[str, object]:
        assert isinstance(self.vector, Named)
        scale = self.vector.scale * self.scale
        return {"vector": vectors[self.vector.name], "scale": scale, "norm": self.norm}

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        with at("vector"):
            vector = by_value(self.vector, width)
        a = float32(self.scale)
        if self.norm == "match":
            # scale/‖v‖ as a factor would overflow for very short vectors.
            return one_edit([Instruction(Op.ADD_MATCHED, write=(unit(vector),), a=a)])
        flags = Flags.KEEP if self.norm == "keep" else Flags.NONE
        return one_edit([Instruction(Op.ADD, write=(vector,), a=a, flags=flags)])
