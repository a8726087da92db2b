"""`Direction`: the direction between two classes at one layer, as edits, probes and names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.plan.forms import LayersLike, NumberLike
from midstream.plan.operations.ablate import Ablate
from midstream.plan.operations.steer import Steer
from midstream.plan.probe import Probe
from midstream.sites import SiteName, Tap
from midstream.validation import at, read_float32

if TYPE_CHECKING:
    from midstream.lab.fit.scores import LayerScore

# Of Neuronpedia's vectors: numbers, and the ends of the slider.
_MAX_NEURONPEDIA, _MAX_STRENGTH = 24_576, 300


class DirectionEdits(ABC):
    """What is an edit, by itself or times a number: a direction, or those of several layers."""

    # A NumPy number leaves the product to `__rmul__`.
    __array_ufunc__ = None

    @abstractmethod
    def steer(self, scale: NumberLike = 1.0, **where: Any) -> Steer:
        """Return the edit that adds its vectors."""

    def register(self, llm: Any, name: str) -> Any:
        """Register the vectors with an engine; requests then use it as `Steer(name)`.

        Args:
            llm: an `LLM`, or an `AsyncLLM` that is ready.
            name: its name; what is registered under it is replaced.

        Returns:
            The description of what is registered.
        """
        return llm.vectors.register(name, self)

    def as_edit(self) -> Steer:
        """Return `steer(1.0)`: what it is as an edit, as in `edits=direction`."""
        return self.steer()

    def __mul__(self, scale: NumberLike) -> Steer:
        """Return `steer(scale)`, of a number times it on either side."""
        return self.steer(scale)

    __rmul__ = __mul__

    def __neg__(self) -> Steer:
        """Return `steer(-1.0)`."""
        return self.steer(-1.0)


@dataclass(frozen=True, eq=False)
class Direction(DirectionEdits):
    """A direction between two classes at one layer.

    The length of `vector` is the distance between the two class means along it, whatever the
    method. So a scale of 1 moves a vector from the negative mean to the positive one, as measured
    along the direction, and −1 moves it back.

    Attributes:
        vector: float32 [width]; positives lie further along it.
        layer: the layer, from 0.
        site: the site.
        midpoint: float32 [width], halfway between the class means; None: it came from a file of
            vectors alone.
        score: scores on held-out rows; None: there are none.
    """

    vector: NDArray[np.float32]
    layer: int
    site: SiteName = "resid_post"
    midpoint: NDArray[np.float32] | None = None
    score: LayerScore | None = None

    @property
    def gap(self) -> float:
        """Distance between the class means along the direction: the length of the vector."""
        return float(np.linalg.norm(self.vector.astype(np.float64)))

    @property
    def unit(self) -> NDArray[np.float32]:
        """The direction with length 1, float32 [width]; zeros if the class means are equal."""
        gap = self.gap
        unit_vector: NDArray[np.float32] = (self.vector / gap if gap else self.vector).astype(
            np.float32
        )
        return unit_vector

    def steer(self, scale: NumberLike = 1.0, **where: Any) -> Steer:
        """Return the edit that adds the vector: h ← h + scale · v.

        Args:
            scale: in distances between the class means.
            **where: other arguments of `Steer`: `positions`, `phase`, `exclude`, `norm`.

        Raises:
            SpecError: an argument is malformed, or the class means are equal.
        """
        return Steer(self.vector, self.layer, scale, self.site, **where)

    def ablate(
        self, strength: NumberLike = 1.0, layer: LayersLike | None = None, **where: Any
    ) -> Ablate:
        """Return the edit that projects the direction out of h.

        Args:
            strength: 1 removes it, 2 reflects.
            layer: other layers, such as "all", from which the same direction is removed; None: its
                own.
            **where: other arguments of `Ablate`.

        Raises:
            SpecError: an argument is malformed, or the class means are equal.
        """
        where.setdefault("site", self.site)
        return Ablate(self.vector, self.layer if layer is None else layer, strength, **where)

    def probe(self, name: str = "probe", **where: Any) -> Probe:
        """Return the probe that reads −1 at the negative class mean and 1 at the positive one.

        Args:
            name: key of the scores in the output.
            **where: other arguments of `Probe`: `positions`, `phase`, `exclude`, `layer`.

        Raises:
            SpecError: an argument is malformed, the class means are equal, or there is no midpoint.
        """
        if self.midpoint is None:
            raise SpecError(
                "midpoint",
                "a file of vectors alone has no midpoint between classes, from which a probe "
                "counts; fit the direction, or load what Directions.save wrote",
            )
        vector = self.vector.astype(np.float64)
        half_gap = float(vector @ vector) / 2
        if half_gap == 0:
            raise SpecError("vector", "the class means are equal, so that a probe has no unit")
        bias = -float(self.midpoint.astype(np.float64) @ vector) / half_gap
        where.setdefault("layer", self.layer)
        return Probe(vector / half_gap, bias=bias, site=self.site, name=name, **where)

    def to_neuronpedia(
        self, model_id: str, label: str, strength: NumberLike = 1.0
    ) -> dict[str, Any]:
        """Return the body of Neuronpedia's `POST /api/vector/new`, JSON values.

        Neuronpedia adds strength · vector, as `steer` does.

        Args:
            model_id: Neuronpedia's name of the model, such as "gemma-2-2b-it".
            label: the name that its page shows.
            strength: strength of the slider at first, −300 to 300, in distances between the class
                means.

        Raises:
            SpecError: the site is neither resid_pre nor resid_post, the vector has more than 24,576
                numbers, or an argument is malformed.
        """
        if self.site not in ("resid_pre", "resid_post"):
            raise SpecError("site", f"Neuronpedia takes resid_pre and resid_post, not {self.site}")
        if self.vector.size > _MAX_NEURONPEDIA:
            raise SpecError(
                "vector", f"Neuronpedia takes {_MAX_NEURONPEDIA} numbers, not {self.vector.size}"
            )
        for name, text in (("model_id", model_id), ("label", label)):
            if not isinstance(text, str) or not text:
                raise SpecError(name, f"expected a text, got {text!r:.60}")
        with at("strength"):
            default = read_float32(strength)
            if abs(default) > _MAX_STRENGTH:
                raise SpecError("", f"expected −{_MAX_STRENGTH} to {_MAX_STRENGTH}, got {default}")
        return {
            "modelId": model_id,
            "layerNumber": self.layer,
            "hookType": f"hook_{self.site}",
            "vector": self.vector.tolist(),
            "vectorDefaultSteerStrength": default,
            "vectorLabel": label,
        }

    def by_tap(self) -> dict[Tap, NDArray[np.float32]]:
        """Return {(site, layer): vector}, as `llm.vectors.register(name, direction)` reads it."""
        return {(self.site, self.layer): self.vector}

    def __repr__(self) -> str:
        score = f", auc={self.score.auc:.3f}" if self.score else ""
        return f"Direction({self.site}.{self.layer}, gap={self.gap:.3g}{score})"
