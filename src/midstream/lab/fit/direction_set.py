"""`DirectionSet`: one direction at each of several layers, and what can be done with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from midstream.errors import SpecError
from midstream.lab.fit.direction import Direction, DirectionEdits
from midstream.lab.fit.samples import read_layers
from midstream.lab.fit.scores import LayerScore
from midstream.plan.forms import NumberLike
from midstream.plan.operations.ablate import Ablate
from midstream.plan.operations.steer import Steer
from midstream.results.arrays import to_numpy
from midstream.sites import SiteName, Tap
from midstream.steering.listing import html_table, text_table
from midstream.validation import is_int, show, suggests
from midstream.viz import Chart, curve

if TYPE_CHECKING:
    from typing_extensions import Self

# What a single direction has.
_INSTEAD = {
    name: f"there is one for each layer; take .best.{name} or [layer].{name}"
    for name in ("vector", "layer", "midpoint", "score", "gap", "unit", "probe", "to_neuronpedia")
}
HEADINGS = ("layer", "AUC", "accuracy", "d′", "gap")


@dataclass(frozen=True, eq=False)
@suggests(_INSTEAD)
class DirectionSet(DirectionEdits):
    """Directions between two classes by layer, with scores on rows that each was not fitted on.

    Attributes:
        vectors: float32 [layers, width]. The length of each is the distance between the class means
            along it, and positives lie further along it: see `Direction`.
        layers: the layers, ascending.
        site: the site.
        midpoints: float32 [layers, width], halfway between the class means; None: unknown.
        scores: by layer; empty: nothing was held out.
        method: name of the method; "" unknown.
        num_folds: folds of the cross-validation; 0: nothing was held out.
        model_type: type of the model as transformers names it, for repeng and GGUF; "" unknown.
    """

    vectors: NDArray[np.float32]
    layers: tuple[int, ...]
    site: SiteName = "resid_post"
    midpoints: NDArray[np.float32] | None = None
    scores: Mapping[int, LayerScore] = field(default_factory=lambda: MappingProxyType({}))
    method: str = ""
    num_folds: int = 0
    model_type: str = ""

    def __getitem__(self, layer: int) -> Direction:
        """Return the direction of a layer."""
        if not is_int(layer) or layer not in self.layers:
            shown = show(int(layer)) if is_int(layer) else repr(layer)
            raise SpecError("layer", f"expected one of {list(self.layers)}, got {shown}")
        index = self.layers.index(int(layer))
        midpoint = None if self.midpoints is None else self.midpoints[index]
        return Direction(
            self.vectors[index], int(layer), self.site, midpoint, self.scores.get(int(layer))
        )

    def __iter__(self) -> Iterator[Direction]:
        return (self[layer] for layer in self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def at(self, layers: Any) -> Self:
        """Return the directions of some layers, ascending.

        Args:
            layers: a layer, or a list or range of layers.

        Raises:
            SpecError: one has no direction.
        """
        wanted = sorted(set(read_layers(layers)))
        directions = [self[layer] for layer in wanted]
        indices = [self.layers.index(direction.layer) for direction in directions]
        return replace(
            self,
            vectors=self.vectors[indices],
            layers=tuple(wanted),
            midpoints=None if self.midpoints is None else self.midpoints[indices],
            scores=MappingProxyType({n: self.scores[n] for n in wanted if n in self.scores}),
        )

    @property
    def best_layer(self) -> int:
        """The layer with the largest d′ on held-out rows; the first of equals.

        Raises:
            SpecError: there are no scores.
        """
        if not self.scores:
            raise SpecError("scores", "nothing was held out, so no layer is best; choose one")
        return max(self.scores, key=lambda layer: (self.scores[layer].d_prime, -layer))

    @property
    def best(self) -> Direction:
        """The direction of `best_layer`. Raises SpecError if there are no scores."""
        return self[self.best_layer]

    def project(self, rows: Any) -> NDArray[np.float32]:
        """Project rows onto the directions: −1 is the negative class mean, 1 the positive.

        Args:
            rows: [layers, tokens, width], an array or a tensor.

        Returns:
            float32 [layers, tokens].

        Raises:
            SpecError: there are no midpoints, or the shape differs.
        """
        seen, vectors = self._less_midpoint(rows)
        half_gap = np.square(vectors).sum(-1) / 2
        # If the class means are equal, the layer separates nothing: every projection is 0.
        half_gap[half_gap == 0] = np.inf
        projections = np.einsum("ltd,ld->lt", seen, vectors) / half_gap[:, None]
        projected: NDArray[np.float32] = projections.astype(np.float32)
        return projected

    def cosine(self, rows: Any) -> NDArray[np.float32]:
        """Return the cosine between the directions and rows less the midpoint, −1 to 1.

        Unlike `project`, it is comparable between layers with different norms. Arguments, result
        and errors are those of `project`.
        """
        seen, vectors = self._less_midpoint(rows)
        norms = np.linalg.norm(seen, axis=-1) * np.linalg.norm(vectors, axis=-1)[:, None]
        norms[norms == 0] = np.inf
        cosines: NDArray[np.float32] = (np.einsum("ltd,ld->lt", seen, vectors) / norms).astype("f4")
        return cosines

    def steer(self, scale: NumberLike = 1.0, **where: Any) -> Steer:
        """Return the edit that adds the vector of each layer at that layer; see `Direction.steer`.

        Each edit moves the stream on top of those of earlier layers.
        """
        return Steer(self.by_layer(), None, scale, self.site, **where)

    def ablate(self, strength: NumberLike = 1.0, **where: Any) -> Ablate:
        """Return the edit that projects each layer's direction out at that layer."""
        return Ablate(self.by_layer(), None, strength, self.site, **where)

    def by_tap(self) -> dict[Tap, NDArray[np.float32]]:
        """Return {(site, layer): vector}, as `llm.vectors.register(name, directions)` reads it."""
        return {(self.site, direction.layer): direction.vector for direction in self}

    def by_layer(self) -> dict[int, NDArray[np.float32]]:
        """Return the vectors, float32 [width], by layer."""
        return dict(zip(self.layers, self.vectors, strict=True))

    def _less_midpoint(self, rows: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return rows less the midpoints, and the vectors, in float64."""
        if self.midpoints is None:
            raise SpecError("midpoints", "a file of vectors alone has no midpoints; fit them")
        if hasattr(rows, "detach"):
            rows = rows.detach().cpu()
        array = to_numpy(rows) if hasattr(rows, "dtype") else np.asarray(rows, np.float64)
        shape = (len(self), self.vectors.shape[1])
        if array.ndim != 3 or (array.shape[0], array.shape[2]) != shape:
            got = list(array.shape)
            raise SpecError("rows", f"expected [{shape[0]}, tokens, {shape[1]}], got {got}")
        seen = array.astype(np.float64) - self.midpoints[:, None]
        return seen, self.vectors.astype(np.float64)

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                f"{d.layer}{' *' if self.scores and d.layer == self.best_layer else ''}",
                *(
                    (f"{s.auc:.3f}", f"{s.accuracy:.3f}", f"{s.d_prime:.2f}")
                    if (s := d.score)
                    else ("", "", "")
                ),
                f"{d.gap:.3g}",
            )
            for d in self
        ]

    def __repr__(self) -> str:
        best = f", best_layer={self.best_layer}" if self.scores else ""
        what = f"{self.method or 'vectors'}, {self.site}, {len(self)} layers{best}"
        return f"{type(self).__name__}({what})"

    def __str__(self) -> str:
        return text_table(HEADINGS, self._cells())

    def picture(self) -> Chart:
        """Return the d′ of each layer on held-out rows, by which `best_layer` is chosen, with its
        standard error over the folds as bars.

        Raises:
            SpecError: there are no scores.
        """
        best = self.best_layer
        layers = [layer for layer in self.layers if layer in self.scores]
        scores = [self.scores[layer] for layer in layers]
        values = np.array([score.d_prime for score in scores])
        errors = np.array([score.d_prime_error or 0.0 for score in scores])
        has_errors = any(score.d_prime_error is not None for score in scores)
        return curve(
            layers,
            {"d′": values},
            title=f"{self.method} at {self.site}, held-out rows",
            x_title="layer",
            y_title="d′ (standard deviations)",
            ranges={"d′": [values - errors, values + errors]} if has_errors else None,
            marked=best,
            level=0.0,
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw `picture()`; see `Chart.plot`."""
        return self.picture().plot(ax)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        if not self.scores:
            return {"text/html": html_table(HEADINGS, self._cells()), "text/plain": str(self)}
        return self.picture()._repr_mimebundle_()
