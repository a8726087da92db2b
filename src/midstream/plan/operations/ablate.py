"""`Ablate`: projecting directions out of h."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.plan import forms
from midstream.plan.argument_names import accept_spellings, only_set
from midstream.plan.instructions import Instruction
from midstream.plan.operation import Operation, one_edit, read_norm, read_scalar, rows_by_value
from midstream.plan.vectors.algebra import orthonormal
from midstream.plan.vectors.matrix import read_directions
from midstream.plan.vectors.named_vector import Named
from midstream.plan.vectors.row_per_layer import check_per_layer, is_by_layer, read_by_layer
from midstream.plan.vectors.vector import Vector
from midstream.validation import at, float32, kind


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Ablate(Operation):
    """Project the selected tokens' vectors out of a subspace: h ← h − strength · Σ ⟨h, u⟩ u.

    The sum is over an orthonormal basis u of the span of the directions. One direction with
    strength 1 is the ablation of Arditi et al. 2024 (arXiv:2406.11717).

    Attributes:
        directions: vectors of the model's hidden size, or names; linearly independent. Their
            lengths and order have no effect. The basis is computed in float64 and rounded to
            float32.
        strength: 1 removes the directions, 0 changes nothing, 2 reflects.
        subspace: of several directions at several layers, True removes all of them at each layer,
            False one per layer; None with one direction, a name, or one layer.
        norm: None or "keep".
    """

    op = "ablate"

    directions: tuple[Vector | Named, ...]
    strength: float
    subspace: bool | None
    norm: str | None

    @accept_spellings
    def __init__(
        self,
        directions: forms.RowsOrNames,
        layer: forms.LayersLike | None = None,
        strength: forms.NumberLike = 1.0,
        site: forms.SitesLike | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
        subspace: bool | None = None,
        norm: Literal["keep"] | None = None,
        head: forms.IndicesLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            directions: one direction [width] or several [k, width]: a list, array, tensor or
                base64 (with `shape` for several); a name, or a list that includes names; or
                `{layer: direction}` without `layer`, one per layer.
            strength: a number.
            layer, site, positions, phase, exclude, head: see Steer.
            subspace: required for a matrix at several layers. True: remove the subspace of all
                rows at each layer. False: remove one row per layer, in their order.
            norm: None, or "keep": the vector is rescaled to the norm that h had, as in Steer.

        Raises:
            SpecError: a field is malformed (its path starts with the field's name), or a direction
                is zero or linearly dependent on earlier ones.
        """
        if is_by_layer(directions):
            assert isinstance(directions, Mapping)
            if subspace:
                raise SpecError("subspace", "a dict by layer has one direction per layer; omit it")
            directions, layer = read_by_layer("directions", directions, layer)
            subspace = False
        with at("subspace"):
            if not (subspace is None or isinstance(subspace, bool)):
                raise SpecError("", f"expected `bool`, got {kind(subspace)}")
        with at("directions"):
            self._set(directions=read_directions(directions), subspace=None)
            vectors = tuple(vector for vector in self.directions if isinstance(vector, Vector))
            if len(vectors) == len(self.directions):
                for part in [(vector,) for vector in vectors] if subspace is False else [vectors]:
                    orthonormal(part)
        self._read(read_scalar, strength=strength)
        self._set(norm=read_norm(norm))
        self._set_place(layer, site, positions, phase, exclude, head)
        self._set(subspace=self._read_subspace(subspace, by_value=vectors == self.directions))

    def own(self) -> dict[str, Any]:
        arguments: dict[str, Any] = {"directions": self.directions, "strength": self.strength}
        if self.subspace is not None:
            arguments["subspace"] = self.subspace
        return arguments | only_set(norm=self.norm)

    def per_layer(self) -> tuple[Ablate, ...]:
        if self.subspace is not False:
            return (self,)
        indices: Any = self.layers.indices
        pairs = zip(self.directions, indices, strict=True)
        return tuple(
            self.replace(directions=row, layer=layer, subspace=None) for row, layer in pairs
        )

    def _with(self, vectors: dict[str, Vector], **place: object) -> Ablate:
        # Names have one reading: each names one vector for all layers.
        if "layer" not in place and len(self.directions) > 1:
            place["subspace"] = True
        return self.replace(**self.bound(vectors), **place)

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        rows = rows_by_value("directions", self.directions, width)
        a = float32(-self.strength) + 0.0
        return one_edit(
            [Instruction(Op.LINEAR, read=u, write=(u,), a=a) for u in orthonormal(rows)], self.norm
        )

    def _read_subspace(self, subspace: bool | None, by_value: bool) -> bool | None:
        count, indices = len(self.directions), self.layers.indices
        if subspace is False:
            if not by_value:
                raise SpecError("subspace", "one row per layer requires vectors, got a name")
            check_per_layer("directions", count, self.layers)
            return None if count == 1 else False
        if count == 1 or not by_value:
            return None
        several = self.sites.in_layers and (indices == "all" or len(indices) > 1)
        if subspace is None and several:
            shown = "all" if indices == "all" else str(len(indices))
            raise SpecError(
                "directions",
                f"{count} directions at {shown} layers can be read two ways; give subspace=True to "
                "remove all of them at each layer, or subspace=False to remove one row per layer",
            )
        return subspace
