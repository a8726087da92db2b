"""`Route`: forcing the choice of a mixture's experts, at its router's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from midstream.errors import SpecError
from midstream.ops.layout import Op
from midstream.plan import forms
from midstream.plan.argument_names import accept_spellings, only_set
from midstream.plan.heads import mask_of, read_indices, vector_of
from midstream.plan.instructions import Instruction
from midstream.plan.operation import Operation, one_edit, read_scalar
from midstream.plan.shape import VectorSize
from midstream.validation import MAX_ITEMS, at, float32, kind, read_int, show

ROUTER = "router"
# The logit of a deactivated expert. Its softmax is exactly 0. Not larger: later edits of the same
# logit are sums in float32, which have six digits.
DEACTIVATED = -1000.0
# How far the logit of an activated expert is above the largest one: this times that logit's
# magnitude, at least this. Several steps of bfloat16, so that rounding leaves no ties.
MARGIN = 1 / 64
MAX_BIAS = 500.0


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Route(Operation):
    """Choose experts for the selected tokens: some always, some never, others more or less likely.

    The edit is made to the router's logits, before softmax and top-k. In this order: `bias` is
    added; the logits of `deactivate` become −1000, whose softmax is 0; the logits of `activate`
    become m + max(|m|, 1) / 64 plus their bias, where m is the largest logit by then. Logits of
    other experts do not change, so their weights keep their ratios. Fayyaz et al. 2025 (SteerMoE,
    arXiv:2509.09660).

    Attributes:
        activate: experts that are always among the chosen ones; ascending.
        deactivate: experts that never are; ascending.
        bias: (expert, number) pairs, ascending: added to the expert's logit.
    """

    op = "route"

    activate: tuple[int, ...]
    deactivate: tuple[int, ...]
    bias: tuple[tuple[int, float], ...]

    @accept_spellings
    def __init__(
        self,
        activate: forms.IndicesLike | None = None,
        deactivate: forms.IndicesLike | None = None,
        bias: Mapping[int, forms.NumberLike] | Mapping[str, forms.NumberLike] | None = None,
        layer: forms.LayersLike | None = None,
        site: forms.SitesLike | None = None,
        positions: forms.PositionsLike = "all",
        phase: forms.PhaseLike | None = None,
        exclude: forms.PositionsLike | None = None,
    ) -> None:
        """Create an edit; each field accepts any of its forms.

        Args:
            activate: an expert, counted from 0, or several; at most as many as the model chooses
                for a token.
            deactivate: an expert, or several; as many as the model chooses must be left.
            bias: numbers that are added to experts' logits, by expert, within ±500; in JSON the
                experts are strings. Not of a deactivated expert, and of an activated one above 0.
            layer, positions, phase, exclude: see Steer.
            site: "router".

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        for field, value in (("activate", activate), ("deactivate", deactivate)):
            is_none = value is None or (isinstance(value, Sequence) and not len(value))
            self._set(**{field: () if is_none else read_indices(value, field)})
        with at("bias"):
            self._set(bias=() if bias is None else _read_bias(bias))
        if not (self.activate or self.deactivate or self.bias):
            raise SpecError("", "give `activate`, `deactivate` or `bias`")
        for expert in self.deactivate:
            if expert in self.activate:
                raise SpecError("deactivate", f"expert {expert} is in `activate` too")
        for expert, number in self.bias:
            with at(f"bias[{expert}]"):
                if expert in self.deactivate:
                    raise SpecError("", "the expert is in `deactivate`, so it has no weight")
                if expert in self.activate and number < 0:
                    raise SpecError(
                        "", "the expert is in `activate`: below 0 it might not be chosen"
                    )
        self._set_place(layer, ROUTER if site is None else site, positions, phase, exclude)
        if self.sites.names != (ROUTER,):
            raise SpecError(
                "site", f"a Route is at `{ROUTER}` only, got {show(self.sites.names[0])}"
            )

    @property
    def forces(self) -> bool:
        """Whether experts are activated or deactivated, rather than only made more likely."""
        return bool(self.activate or self.deactivate)

    def own(self) -> dict[str, Any]:
        return only_set(
            activate=list(self.activate),
            deactivate=list(self.deactivate),
            bias={str(expert): number for expert, number in self.bias},
        )

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        size = width if isinstance(width, VectorSize) else VectorSize(width)
        self._check(size)
        steps = []
        added = {expert: number for expert, number in self.bias if expert not in self.activate}
        if added:
            steps.append(Instruction(Op.ADD, write=(vector_of(added, size),), a=1.0))
        if self.deactivate:
            low = dict.fromkeys(self.deactivate, DEACTIVATED)
            mask = mask_of(self.deactivate, size)
            steps.append(Instruction(Op.REPLACE, write=(vector_of(low, size),), a=1.0, mask=mask))
        if self.activate:
            own = {expert: number for expert, number in self.bias if expert in self.activate}
            mask = mask_of(self.activate, size)
            steps.append(
                Instruction(Op.RAISE, write=(vector_of(own, size),), a=1.0, b=MARGIN, mask=mask)
            )
        return one_edit(steps, in_turn=True)

    def _check(self, size: VectorSize) -> None:
        biased = tuple(expert for expert, _ in self.bias)
        for field in ("activate", "deactivate", "bias"):
            experts = biased if field == "bias" else getattr(self, field)
            if experts and experts[-1] >= size:
                raise SpecError(field, f"{experts[-1]} is out of range: there are {size} experts")
        if not self.forces or not size.routing:
            return
        if isinstance(size.routing, str):
            raise SpecError(
                "activate" if self.activate else "deactivate",
                f"unsupported by this model: {size.routing}; `bias` alone is supported",
            )
        if len(self.activate) > size.routing:
            raise SpecError(
                "activate",
                f"expected at most {size.routing} experts, as many as the model chooses for a "
                f"token, got {len(self.activate)}",
            )
        left = size - len(self.deactivate)
        if left < size.routing:
            raise SpecError(
                "deactivate",
                f"{left} of {size} experts are left, but the model chooses {size.routing} for "
                "each token",
            )


def _read_bias(value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise SpecError("", f"expected {{expert: number}}, got {kind(value)}")
    if not 1 <= len(value) <= MAX_ITEMS:
        raise SpecError("", f"expected 1 to {MAX_ITEMS} experts, got {len(value)}")
    biases: dict[int, float] = {}
    for key, number in value.items():
        with at(f"[{show(key) if isinstance(key, str | int) else kind(key)}]"):
            is_text = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 10
            expert = int(key) if is_text else read_int(key)
            if expert < 0:
                raise SpecError("", f"expected an index from 0 on, got {expert}")
            if expert in biases:
                raise SpecError("", "the expert is given twice")
            biases[expert] = read_scalar(number)
            if not 0 < abs(float32(biases[expert])) <= MAX_BIAS:
                raise SpecError("", f"expected a number within ±500, not 0, got {number}")
    return tuple(sorted(biases.items()))
