"""`Probe`: a score of selected tokens: linear at one tap, or of their attention in one layer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from midstream.errors import SpecError
from midstream.ops.layout import Flags, Op
from midstream.spec.act import Act, Switch, read_act
from midstream.spec.algebra import float32
from midstream.spec.argument_names import accept_spellings
from midstream.spec.attention import Entropy, Mass, read_reduction
from midstream.spec.forms import (
    IndicesLike,
    LayersLike,
    NumberLike,
    PhaseLike,
    PositionsLike,
    SitesLike,
    VectorOrName,
)
from midstream.spec.instructions import Instruction
from midstream.spec.linear_classifier import read_linear
from midstream.spec.named_lookup import Lookup
from midstream.spec.named_vector import Named, read_direction
from midstream.spec.operation import Operation, by_value, read_scalar
from midstream.spec.positions.positions import Positions
from midstream.spec.vector import Vector
from midstream.validation import at, kind, show

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Probe(Operation):
    """A probe of the selected tokens: one score for each, linear or of their attention.

    With `direction`, score = ⟨h, direction⟩ + bias at one tap, where h includes all edits at that
    tap. Alain and Bengio 2016 (linear probes, arXiv:1610.01644).

    With `attention`, the score is the mean over `heads` of what the token's query attends to in one
    layer: `Mass(positions)`, the sum of the weights of the keys at these positions, or `Entropy()`,
    that of the weights. See `Attention` for the weights, and for what the engine must tap. Such a
    score is known after the forward pass, so no Gate can read it.

    With `act`, the completion ends, gets other edits, or has its receipt flagged, when the scores
    meet a condition.

    Attributes:
        direction: a vector of the model's hidden size, or a name; None: see `attention`.
        bias: in units of the score.
        name: key of the scores in the output; 1 to 64 of the characters A–Z a–z 0–9 _ . : -
        attention: what is read of the attention weights; None: see `direction`.
        act: what is done when the scores meet a condition; None: they are returned only.
        layers: one.
        sites: one; not read with `attention`.
    """

    direction: Vector | Named | None
    bias: float
    name: str
    attention: Mass | Entropy | None
    act: Act | None

    @accept_spellings
    def __init__(
        self,
        direction: VectorOrName | None = None,
        layer: LayersLike | None = None,
        bias: NumberLike = 0.0,
        site: SitesLike | None = None,
        name: str | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
        head: IndicesLike | Literal["all"] | None = None,
        *,
        attention: Mass | Entropy | Mapping[str, Any] | str | None = None,
        act: Act | Mapping[str, Any] | None = None,
    ) -> None:
        """Create a probe; each field accepts any of its forms.

        Args:
            direction: any form of Vector.parse, or a name. Either this or `attention` is given.
            layer: an int; may be omitted for the name of a vector registered for one tap.
            bias: a number.
            site: a site's name or alias; default "resid_post".
            name: None: "probe".
            positions: any form of Positions.
            phase: "prompt" or "generated" restricts the positions to tokens of that phase.
            exclude: positions to exclude.
            head: the attention head that is read, at a site whose vectors are of heads; the
                direction then has the size of a head. With `attention` the query heads, one or
                more; None or "all": all of the layer.
            attention: `Mass(positions)`, `Entropy()`, or the JSON form of one.
            act: `Stop(…)`, `Switch(…)`, `Flag(…)`, or the JSON form of one. The positions are then
                known before the request ends: not "last".

        Raises:
            SpecError: a field is malformed; its path starts with the field's name.
        """
        if (direction is None) == (attention is None):
            problem = "missing: give a direction, or `attention`"
            if direction is not None:
                problem = "a probe reads a direction or attention; use one probe for each"
            raise SpecError("direction" if direction is None else "attention", problem)
        with at("direction"):
            self._set(direction=None if direction is None else read_direction(direction))
        with at("attention"):
            self._set(attention=None if attention is None else _read_attention(attention))
        with at("bias"):
            self._set(bias=read_scalar(bias))
        with at("name"):
            self._set(name="probe" if name is None else _read_name(name))
        with at("act"):
            self._set(act=None if act is None else read_act(act))
        if self.attention is not None:
            self._check_alone(site)
            head = None if isinstance(head, str) and head == "all" else head
        self._set_place(layer, site, positions, phase, exclude, head, last=True)
        if self.attention is not None:
            # It is read where the layer's queries are, whichever site that is.
            self._set(left=("site",))
        elif len(self.heads) > 1:
            raise SpecError("head", "a probe reads one head; use one probe per head")
        layers = self.layers.indices
        several = layers == "all" or len(layers) > 1
        if several and "layer" not in self.left and self.sites.in_layers:
            shown = '"all"' if layers == "all" else f"{len(layers)} layers"
            raise SpecError(
                "layer", f"a probe reads one layer, got {shown}; use one probe per layer"
            )
        if self.act is not None and "last" in self.positions.include:
            raise SpecError(
                self.positions.path(self.positions.include.index("last")),
                '"last" is known only when the request has ended, so a probe there cannot act; use '
                '"last_prompt" or "generated"',
            )
        if len(self.sites) > 1:
            raise SpecError(
                "site", f"a probe reads one site, got {len(self.sites)}; use one probe per site"
            )

    @staticmethod
    def from_sklearn(
        classifier: object,
        layer: LayersLike | None = None,
        site: SitesLike | None = None,
        name: str | None = None,
        positions: PositionsLike = "all",
        phase: PhaseLike | None = None,
        exclude: PositionsLike | None = None,
    ) -> Probe:
        """Return the probe whose scores are the `decision_function` of a linear classifier.

        Args:
            classifier: a fitted binary `LogisticRegression`, `LinearDiscriminantAnalysis`,
                `RidgeClassifier` or `LinearSVC`, or the CV form of the first and third; or a
                `Pipeline` of `StandardScaler` and one of them. Weights are rounded to float32.
            layer, site, name, positions, phase, exclude: see the constructor.

        Raises:
            SpecError: another classifier, one that is not fitted, or one of more than two classes.
        """
        with at("classifier"):
            weights, bias = read_linear(classifier)
        return Probe(weights, layer, bias, site, name, positions, phase, exclude)

    def _check_alone(self, site: SitesLike | None) -> None:
        """Check that a probe of attention has nothing that only a direction has."""
        if site is not None:
            raise SpecError("site", "a probe of attention reads a layer, not a site; omit `site`")
        if self.bias:
            raise SpecError("bias", "a probe of attention has none; omit `bias`")

    def own(self) -> dict[str, Any]:
        found: dict[str, Any] = {"direction": self.direction, "bias": self.bias}
        if self.attention is not None:
            found = {"attention": self.attention}
        found["name"] = self.name
        return found if self.act is None else {**found, "act": self.act}

    @property
    def selections(self) -> tuple[Positions, ...]:
        """All positions that it names: its own, and keys of a `Mass`."""
        keys = (self.attention.positions,) if isinstance(self.attention, Mass) else ()
        return (self.positions, *keys)

    def bind(self, lookup: Lookup, num_layers: int | None = None) -> tuple[Probe, ...]:
        """Return the probe with its name replaced by the vector, at one tap.

        Args:
            lookup, num_layers: see Operation.bind.

        Raises:
            SpecError: the name is unknown, has no vector for the requested tap, or has several
                taps and none is requested.
        """
        # super() without arguments fails here: `slots=True` replaces the class.
        found = Operation.bind(self, lookup, num_layers)
        if len(found) > 1:
            raise SpecError(
                "layer",
                f"`{self.names()[0]}` is registered for {len(found)} taps, but a probe reads one "
                "tap; give `layer` and `site`",
            )
        if isinstance(self.act, Switch) and not self.act.is_bound:
            with at("act.switch"):
                act = self.act.bind(lookup, num_layers)
            return tuple(one.replace(act=act) for one in found)
        return found

    @property
    def is_bound(self) -> bool:
        is_act_bound = not isinstance(self.act, Switch) or self.act.is_bound
        return is_act_bound and not self.names()

    def instructions(self, width: int) -> tuple[Instruction, ...]:
        assert self.direction is not None, "attention is not read by instructions"
        with at("direction"):
            direction = by_value(self.direction, width)
        return (
            Instruction(
                Op.PROBE,
                read=direction,
                a=float32(self.bias),
                flags=Flags.FRESH | Flags.COUNTED,
            ),
        )


def _read_attention(value: object) -> Mass | Entropy:
    found = read_reduction(value)
    if isinstance(found, (Mass, Entropy)):
        return found
    raise SpecError(
        "",
        "a probe reads one number for each head: Mass(positions) or Entropy(); for others use "
        "Attention(…), given as `capture`",
    )


def _read_name(value: object) -> str:
    if not isinstance(value, str):
        raise SpecError("", f"expected a name, `str`, got {kind(value)}")
    if not _NAME.fullmatch(value):
        raise SpecError(
            "", f"expected 1 to 64 of the characters A-Z a-z 0-9 _ . : -, got {show(value)}"
        )
    return str(value)  # of a subclass, such as NumPy's, which messages cannot have
